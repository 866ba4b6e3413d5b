"""`python -m pipeline.mscan FILE`."""

from instruments.parameter_scan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
