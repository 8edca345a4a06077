"""`python -m controlplane.embedded.probe URL`: exit 0 when GET answers 200; the health check of containers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

from controlplane.embedded.services import answers
from controlplane.settings import TlsSettings


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    url = urlsplit(arguments[0])
    tls = TlsSettings(certificate=Path("any")) if url.scheme == "https" else TlsSettings()
    return 0 if asyncio.run(answers(url.netloc, tls, url.path or "/")()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
