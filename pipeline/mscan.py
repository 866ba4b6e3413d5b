"""`python -m pipeline.mscan FILE`."""

import sys

from instruments.mscan.command import main

if __name__ == "__main__":
    sys.exit(main())
