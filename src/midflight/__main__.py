"""`python -m midflight`."""

import sys

from midflight.cli import main

sys.exit(main())
