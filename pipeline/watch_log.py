"""`python -m pipeline.watch_log FILE --plot OUT`."""

import sys

from instruments.training_watch.command import main

if __name__ == "__main__":
    sys.exit(main())
