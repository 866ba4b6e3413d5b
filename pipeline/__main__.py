"""`python -m pipeline`."""

import sys

from pipeline.help_page import help_page


def main() -> int:
    """Show the help page, or run the command; returns the exit code."""
    words = sys.argv[1:]
    if {"-h", "--help", "help"} & set(words):
        sys.stdout.write(help_page())
        return 0
    from pipeline.cli import run_command  # noqa: PLC0415 - the help page needs none of what this imports

    return run_command(words)


if __name__ == "__main__":
    sys.exit(main())
