"""`python -m controlplane.worker`: one worker process."""

import sys

from controlplane.worker.main import main

sys.exit(main())
