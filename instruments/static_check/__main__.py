"""`python -m instruments.static_check PATH`, as `python -m pipeline static_check PATH`."""

import sys

from instruments.static_check.check import main

sys.exit(main())
