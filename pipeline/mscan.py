"""`python -m pipeline.mscan FILE`."""

from instruments.mscan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
