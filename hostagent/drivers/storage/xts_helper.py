"""AES-256-XTS by libcrypto in a process of its own: 64 bytes of key and whole sectors in, the sectors encrypted out.

The one rule: it is a program that ends after one use; the agent itself loads no C library. The tweak is the number of the
512-byte sector, counted from 0 (`plain64`). Source: EVP_EncryptInit(3), IEEE 1619.
"""

from __future__ import annotations

import ctypes
import sys

LIBRARY = "libcrypto.so.3"
KEY_BYTES = 64
SECTOR_BYTES = 512


def encrypted(key: bytes, data: bytes) -> bytes:
    """Raises OSError without the library, ValueError when it refuses."""
    library = ctypes.CDLL(LIBRARY)
    for name in ("EVP_CIPHER_CTX_new", "EVP_aes_256_xts"):
        getattr(library, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.EVP_CIPHER_CTX_new())
    cipher = ctypes.c_void_p(library.EVP_aes_256_xts())
    out, length = ctypes.create_string_buffer(SECTOR_BYTES), ctypes.c_int()
    sectors = []
    for at in range(0, len(data), SECTOR_BYTES):
        tweak = (at // SECTOR_BYTES).to_bytes(16, "little")
        is_begun = library.EVP_EncryptInit_ex(context, cipher, None, key, tweak)
        sector = data[at : at + SECTOR_BYTES]
        if not is_begun or not library.EVP_EncryptUpdate(context, out, ctypes.byref(length), sector, len(sector)):
            raise ValueError("libcrypto refuses to encrypt")
        sectors.append(out.raw[: length.value])
    library.EVP_CIPHER_CTX_free(context)
    return b"".join(sectors)


def main() -> int:
    given = sys.stdin.buffer.read()
    sys.stdout.buffer.write(encrypted(given[:KEY_BYTES], given[KEY_BYTES:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
