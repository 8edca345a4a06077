"""`python -m controlplane.watch`: one watch process."""

import sys

from controlplane.watch.main import main

sys.exit(main())
