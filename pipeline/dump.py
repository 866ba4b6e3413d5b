"""`python -m pipeline.dump show|compare|export FOLDER ...`."""

from instruments.tensor_dump.command import main

if __name__ == "__main__":
    raise SystemExit(main())
