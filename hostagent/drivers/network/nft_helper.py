"""The helper process: Debian's nftables bindings kept warm, fed with transactions as JSON lines. Run by the system's Python.

The one rule: this file imports the standard library and `nftables` alone, and only its own process calls `main`: the GPL
library is loaded in that process only, and when it aborts (it does on some listings) the agent lives on.

`{"id":1,"text":"add …"}` → `{"id":1,"rc":0,"out":"","err":""}`. It ends when its stdin does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

TRIM_BYTES = 32 << 20


def main() -> int:
    import nftables  # pyright: ignore[reportMissingImports] - the distribution's, for the system's Python only

    rules = nftables.Nftables()
    rules.set_handle_output(False)
    libc = ctypes.CDLL(None)
    pages = os.sysconf("SC_PAGESIZE")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        code, out, error = rules.cmd(request["text"])
        answer = {"id": request["id"], "rc": code, "out": out, "err": error}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - once a transaction
            if int(statm.read().split()[1]) * pages > TRIM_BYTES:
                libc.malloc_trim(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
