"""The items of carve_choices, as lm-evaluation-harness asks for them.

It loads this file by itself, so that nothing of this project is imported here.
"""

from pathlib import Path
from typing import Any


def load_choices(**_settings: object) -> dict[str, Any]:
    """The one split, from the file in this folder, found from any working folder and without a network."""
    from datasets import Dataset  # noqa: PLC0415 - an optional extra brings it

    return {"test": Dataset.from_json(str(Path(__file__).with_name("carve_choices.jsonl")))}
