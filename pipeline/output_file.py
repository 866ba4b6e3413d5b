"""Where a command is to write."""

from pathlib import Path

from models.errors import ConfigError


def check_output(out: Path) -> None:
    """Before anything is computed. Raises ConfigError: its folder is not there, or it is one itself."""
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", where=str(out), do=f"mkdir -p {out.parent}")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", where="command line", do="name another output file")
