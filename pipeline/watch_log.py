"""`python -m pipeline.watch_log FILE --plot OUT`."""

import sys

from instruments.training_watch.step_log import main

if __name__ == "__main__":
    sys.exit(main())
