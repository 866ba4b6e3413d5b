"""Settings that notes and model cards advise: appended to the same command, they have the promised effect."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.carving import words_of_pico
from pico import write_pico

from pipeline.artifacts import Manifest
from pipeline.cli import run_command
from stages.artifacts.job import Table

QUICK = ("scan=forward_only", "cluster=random", "cluster.map=none", "vocabulary=none")
# One expert per token and few tokens: some experts are never chosen.
CROWDED = ("stage=assemble", "experts=32", "n=4", "top_k=1", "always_on=8", "assemble.router_tokens=512")


@dataclass(frozen=True)
class Carve:
    """A run's final table, and its model card."""

    table: Table
    card: str

    def note(self, words: str) -> str | None:
        """The first note that contains these words, if any."""
        return next((note for note in self.table.notes if words in note), None)

    @property
    def unused(self) -> int:
        """Experts that no token is sent to, summed over layers."""
        column = self.table.columns.index("unused experts")
        return sum(int(row[column]) for row in self.table.rows)

    def line(self, words: str) -> str:
        """The item of the card's list that begins with these words."""
        (line,) = (line for line in self.card.splitlines() if line.startswith(f"- {words}"))
        return line


@pytest.fixture(scope="module")
def carve(tmp_path_factory, text):
    """Run the command for a small model; `wide` has matrices that runtimes have fast kernels for."""
    folder = tmp_path_factory.mktemp("advice")
    write_pico(folder / "narrow", "qwen3", layers=1, intermediate=136, tokenizer=True)
    write_pico(folder / "wide", "qwen3", layers=1, hidden=256, intermediate=1024, tokenizer=True)

    def run(*words, source="narrow"):
        given = words_of_pico(folder / source, text)
        assert run_command([*given, *QUICK, f"output_dir={folder / 'outputs'}", *words]) == 0
        checkpoint = (folder / "outputs" / "latest" / "checkpoint").resolve()
        manifest = Manifest.read(checkpoint.parent, remedy="")
        return Carve(manifest.table, Path(checkpoint / "README.md").read_text())

    return run


def advised(text: str) -> list[str]:
    """The settings that a text names."""
    words = re.findall(r"\b[a-z_]+\.[a-z_]+=[\w.]+\b", text)
    assert words, text
    return words


def test_experts_that_are_not_used_come_into_use(carve):
    words = [*CROWDED]
    before = carve(*words)
    note = before.note("chosen by no calibration token")
    assert note is not None
    assert note.startswith(f"{before.unused} experts are chosen by no calibration token")
    after = carve(*words, *advised(note))
    assert after.unused < before.unused


@pytest.mark.parametrize(
    ("runtime", "n", "words"), [("vLLM", 24, "take a slower path"), ("llama.cpp: ", 24, "quantised formats want")]
)
def test_widths_that_a_runtime_wants(carve, runtime, n, words):
    shape = ["stage=assemble", "experts=4", f"n={n}", "top_k=2", "assemble=random"]
    line = carve(*shape, source="wide").line(runtime)
    assert words in line
    assert words not in carve(*shape, *advised(line), source="wide").line(runtime)
