"""The gradient term of S_p changes the checkpoint's weights; a score that is not used changes nothing."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from integration.carving import words_of_pico
from pico import write_pico

from pipeline.cli import run_command

WORDS = ("stage=assemble", "experts=4", "n=8", "top_k=2", "always_on=8", "cluster.map=none", "assemble=random")
SCORES = {
    "s_p": [],
    "random": ["score=random"],
    "without gradient": ["score.gradient_weight=0"],
    "forward only": ["scan=forward_only"],
}


@pytest.fixture(scope="module")
def carved(tmp_path_factory, text):
    """The published folders of assemble, by the score that ranked the neurons."""
    outputs, found = tmp_path_factory.mktemp("outputs"), {}
    source = write_pico(outputs / "pico", "qwen3", tokenizer=True)
    for name, words in SCORES.items():
        assert run_command([*words_of_pico(source, text), *WORDS, f"output_dir={outputs}", *words]) == 0
        found[name] = (outputs / "latest" / "checkpoint").resolve().parent
    return found


def weights(folder: Path) -> dict[str, str]:
    """Hash of every file of weights in the checkpoint."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name.startswith("checkpoint/model")}


def card(folder: Path) -> str:
    return (folder / "checkpoint" / "README.md").read_text()


def test_every_score_makes_another_checkpoint(carved):
    """Except the forward-only one, which is S_p without its gradient term: the same weights, and another card."""
    alike = {("without gradient", "forward only")}
    for one, other in combinations(SCORES, 2):
        assert (weights(carved[one]) == weights(carved[other])) == ((one, other) in alike), (one, other)
        assert weights(carved[one]).keys() == weights(carved[other]).keys() != set()


def test_the_card_says_what_ranked_the_neurons(carved):
    assert "always-on neurons by random |" in card(carved["random"])
    assert "always-on neurons by s_p without its gradient term (the scan was f" in card(carved["forward only"])
