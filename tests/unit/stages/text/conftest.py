import json

import pytest
from transformers import AutoTokenizer

from models.source import EMBEDDED


@pytest.fixture
def tokenizer():
    """A new tokenizer for every test, so that tests can change its chat template."""
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name, records):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def conversation():
    return [
        {"role": "user", "content": "What is a lobster?"},
        {"role": "assistant", "content": "A crustacean."},
        {"role": "user", "content": "Und auf Chinesisch?"},
        {"role": "assistant", "content": "龙虾 🦞"},
    ]
