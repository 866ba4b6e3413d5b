"""`python -m pipeline.static_check PATH ...`."""

from instruments.static_check.check import main

if __name__ == "__main__":
    raise SystemExit(main())
