"""What belongs to a model beside weights and config.json."""

import shutil
from pathlib import Path

_PATTERNS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "spiece.model", "chat_template*", "LICENSE*", "NOTICE*",
)  # fmt: skip


def copy_companions(source_folder: Path, out_folder: Path) -> None:
    """Copy tokenizer, chat template, generation defaults and licence, where they are."""
    for pattern in _PATTERNS:
        for path in source_folder.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out_folder / path.name)
