"""`python -m controlplane.api`: the API process."""

from __future__ import annotations

import sys

from controlplane.api.server import main

if __name__ == "__main__":
    sys.exit(main())
