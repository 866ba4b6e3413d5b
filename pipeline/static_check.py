"""`python -m pipeline.static_check PATH ...`."""

import sys

from instruments.static_check.check import main

if __name__ == "__main__":
    sys.exit(main())
