"""The modelling code beside the weights, for those who have transformers and not this project."""

import shutil
from pathlib import Path

CODE_FILES = ("configuration_tiny_onn.py", "modeling_tiny_onn.py", "sparse_ffn.py", "load_balance.py")


def copy_code(folder: Path) -> None:
    """Copy what `auto_map` in config.json names into a checkpoint's folder."""
    for name in CODE_FILES:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
