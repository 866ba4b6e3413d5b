"""What to type once a stage has been run alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifact import MANIFEST, Manifest
from pipeline.command import command_line
from pipeline.disk import in_mib

MOST_FILES = 6


@dataclass(frozen=True)
class Next:
    """What is said after a stage, and the settings of the commands that go on from it."""

    words: str
    changes: Sequence[dict[str, str]]


NEXT = {
    "scan": Next(
        "score ranks the neurons; project runs all that is missing up to the checkpoint to use",
        [{"stage": "score"}, {"stage": "project"}],
    ),
    "score": Next("cluster groups the neurons into experts", [{"stage": "cluster"}]),
    "cluster": Next("extract cuts the experts out of the dense model", [{"stage": "extract"}]),
    "extract": Next("assemble fits the routers and puts the experts behind them", [{"stage": "assemble"}]),
    "assemble": Next(
        "this checkpoint holds the experts as they were cut, for comparison; project aligns them with the dense model "
        "and writes the checkpoint to use",
        [{"stage": "project"}],
    ),
    "project": Next(
        "evaluate compares this checkpoint with the dense model, train goes on with continued pretraining",
        [{"stage": "evaluate"}, {"stage": "train"}],
    ),
    "train": Next(
        "evaluate compares the trained checkpoint with the dense model",
        [{"stage": "evaluate", "evaluate.checkpoint": "train"}],
    ),
}


def next_commands(stage: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """What is to be said after a stage, and the commands: the typed settings again, with another stage.

    Nothing where a run ends for good: after an evaluation, and after a look into a model.
    """
    if stage not in NEXT:
        return "", []
    kept = [word for word in overrides if word.partition("=")[0] != "fresh"]
    return NEXT[stage].words, [command_line(kept, **changes) for changes in NEXT[stage].changes]


def written_files(folder: Path, manifest: Manifest) -> list[str]:
    """The files of a published result with their sizes, the largest first; the manifest itself is not among them."""
    files = sorted(manifest.files.items(), key=lambda item: (-item[1].get("size", 0), item[0]))
    lines = [f"{folder / name} ({in_mib(facts.get('size', 0))})" for name, facts in files[:MOST_FILES]]
    left = len(files) - len(lines)
    return [*lines, f"and {left} smaller; {MANIFEST} lists all"] if left else lines
