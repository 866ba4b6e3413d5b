"""`python -m pipeline.watch_log FILE --plot OUT`."""

from instruments.training_watch.step_log import main

if __name__ == "__main__":
    raise SystemExit(main())
