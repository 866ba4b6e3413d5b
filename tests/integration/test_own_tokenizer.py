"""A checkpoint with a tokenizer class of its own, which model.trust_remote_code=true allows."""

import json

import pytest
from integration.carving import words_of_pico
from pico import write_pico

from instruments.errors import FAILED
from pipeline.cli import run_command

CODE = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def words(tmp_path, monkeypatch, text):
    """The command line of a short run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_pico(tmp_path / "pico", "llama", tokenizer=True)
    (folder / "own.py").write_text(CODE)
    settings = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    return [
        *words_of_pico(folder, text),
        *("experts=4", "n=8", "top_k=2", "always_on=8", "cluster.map=none", "evaluate.speed_tokens=0"),
        *(
            "evaluate.baselines=[static_mask]",
            "project.gradient_projection=false",
            "train.tokens=400",
            f"output_dir={tmp_path / 'out'}",
        ),
    ]


def test_every_stage_loads_it(words):
    trusted = [*words, "model.trust_remote_code=true"]
    assert run_command([*trusted, "evaluate.checkpoint=train"]) == 0
    assert run_command([*trusted, "stage=dump", "dump.steps=1"]) == 0


def test_without_trust_it_is_refused(words, capsys):
    assert run_command([*words, "stage=scan"]) == FAILED
    assert "no usable tokenizer: " in capsys.readouterr().err
