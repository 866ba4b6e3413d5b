"""The items of carve_choices for lm-evaluation-harness.

The harness loads this file on its own, so it imports nothing of this project.
"""

from pathlib import Path
from typing import Any


def load_choices(**_settings: object) -> dict[str, Any]:
    """The only split, read from the file in this folder, from any working folder and without a network."""
    from datasets import Dataset  # noqa: PLC0415 - an optional extra brings it

    return {"test": Dataset.from_json(str(Path(__file__).with_name("carve_choices.jsonl")))}
