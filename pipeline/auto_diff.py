"""`python -m pipeline.auto_diff --model FILE.py:NAME --input sample.pt`."""

from instruments.precision.command import main

if __name__ == "__main__":
    raise SystemExit(main())
