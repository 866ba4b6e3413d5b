"""`python -m pipeline.dump show|compare|export FOLDER ...`."""

import sys

from instruments.tensor_dump.command import main

if __name__ == "__main__":
    sys.exit(main())
