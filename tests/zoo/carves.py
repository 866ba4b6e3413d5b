"""Carve a checkpoint of the zoo with all experts on, and compare it with its dense model in a fresh process."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest.mock import patch

import transformers
from zoo.checkpoints import UNBUILT, write_checkpoint

from instruments.errors import UserError
from models.config import MoEShape
from models.finding import find_decoder
from models.targets.config import select_target
from pipeline.cli import start
from stages.scan import passes

NATIVE, OWN, REFUSED, FAILED, MISSING = "carved natively", "carved as TinyONN", "refused", "failed", "cannot be built"
OUTCOMES = (NATIVE, OWN, REFUSED, FAILED, MISSING)
TOLERANCE = 2e-5  # standard deviations of the dense model's logits; rounding in fp32 reaches 1.4e-5 with an image
PATIENCE = 120  # seconds to build and carve a type

# 4 experts, all of them on; constant gates, and weights as they were cut.
ALL_ON = (*("stage=project", "project=align", "experts=4", "top_k=4"), "assemble.logit_std=0")
# What does not depend on the source, at its cheapest.
QUICK = (
    *("data=text", "data.tokens=600", "data.heldout_tokens=200", "data.max_length=48", "data.heldout_share=0.3"),
    *("scan.batch_tokens=200", "vocabulary=none", "cluster=random", "cluster.map=none", "assemble=random"),
)


@dataclass
class Finding:
    """What happened to one type."""

    name: str
    outcome: str
    reason: str = ""  # why not carved, or what is wrong with the carve
    dense: str = ""  # class of the source
    target: str = ""  # class of the carve
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)  # by zoo.comparison


class Zoo:
    """A folder for checkpoints and carves, and the fresh process that compares them."""

    def __init__(self, folder: Path, text: Path, settings: tuple[str, ...] = ()) -> None:
        """The text is the one to calibrate on; `settings` are words of the command line in addition to ours."""
        self.folder, self.text, self.settings = folder, text, settings
        self._process: subprocess.Popen[str] | None = None

    def examine(self, name: str) -> Finding:
        """Build a type, carve it and compare the carve."""
        begun = time.perf_counter()
        found = Finding(name, MISSING, UNBUILT[name]) if name in UNBUILT else self._examine(name)
        found.seconds = time.perf_counter() - begun
        return found

    def _examine(self, name: str) -> Finding:
        try:
            with _quiet(self.folder / "log.txt"):
                folder = write_checkpoint(name, self.folder / name)
        except Exception as error:  # noqa: BLE001 - transformers raises anything
            return Finding(name, FAILED, f"not built: {_described(error)}")
        found = self.carve(folder)
        if found.outcome in {NATIVE, OWN}:
            found.measured = self.compare(folder, Path(found.measured.pop("checkpoint")))
            if wrong := problems(found.measured):
                found.outcome, found.reason = FAILED, "; ".join(wrong)
        return found

    def carve(self, folder: Path) -> Finding:
        """Run the chain up to project on a checkpoint of the dense model; `measured` has the carve's place."""
        dense = json.loads((folder / "config.json").read_text())["architectures"][0]
        words = (f"model.path={folder}", f"model.label={folder.name}", f"data.path={self.text}")
        place = f"output_dir={self.folder / 'outputs'}"
        try:
            # A random model is worse than chance.
            with _quiet(self.folder / "log.txt"), patch.object(passes, "WORSE_THAN_CHANCE", math.inf):
                steps = start(["model=local", *words, place, *QUICK, *ALL_ON, *_widths(folder), *self.settings])
        except UserError as error:
            reasons = [line for line in str(error).splitlines() if line and not line.startswith("  ")]
            late = [path.parts[-2] for path in (self.folder / "outputs/artifacts" / folder.name).glob("*/*")]
            reasons += [f"only after {', '.join(late)}"] if late else []
            return Finding(folder.name, REFUSED, "; ".join(reasons), dense)
        except Exception as error:  # noqa: BLE001 - every other end of a run is a fault of ours
            return Finding(folder.name, FAILED, _described(error), dense)
        checkpoint = steps[-1].folder / "checkpoint"
        config = json.loads((checkpoint / "config.json").read_text())
        outcome = OWN if "tiny_onn" in config["model_type"] else NATIVE
        target = config["architectures"][0]
        return Finding(folder.name, outcome, "", dense, target, measured={"checkpoint": str(checkpoint)})

    def compare(self, dense: Path, carved: Path) -> dict[str, Any]:
        """What zoo.comparison finds."""
        if self._process is None or self._process.poll() is not None:
            environment = os.environ | {"HF_MODULES_CACHE": str(self.folder / "modules"), "HF_HUB_OFFLINE": "1"}
            script = Path(__file__).with_name("comparison.py")
            with (self.folder / "comparison.txt").open("a") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, script], stdin=PIPE, stdout=PIPE, stderr=errors, text=True, env=environment
                )
        assert self._process.stdin, self._process.stdout
        self._process.stdin.write(json.dumps({"dense": str(dense), "carved": str(carved)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the comparing process died"}

    def close(self) -> None:
        """End the comparing process."""
        if self._process is not None:
            self._process.communicate()


def problems(measured: dict[str, Any]) -> list[str]:
    """What is wrong with a carve, by what was measured."""
    if "error" in measured:
        return [f"comparison: {measured['error']}"]
    copied, given = measured["copied"]
    over = {
        what: measured.get(key)
        for key, what in {
            "difference": "",
            "generated": " in generation",
            "image": " with an image",
            "image_generated": " in generation with an image",
        }.items()
        if isinstance(measured.get(key), float) and not measured[key] <= TOLERANCE
    }
    checks = {
        f"keys: {measured['loading']}": bool(measured["loading"]),
        "; ".join(f"logits{what} differ by {value:.1e}" for what, value in over.items()): bool(over),
        f"only {copied} of {given} tensors for images and sounds are copied": copied != given,
        "the experts have no effect": not measured["without_experts"] > 1000 * TOLERANCE,
    }
    return [what for what, wrong in checks.items() if wrong]


def _widths(folder: Path) -> tuple[str, ...]:
    """32 neurons are always on, or none where only then a target other than our own class can hold the model."""
    decoder = find_decoder(folder)
    width = decoder.width
    own, routed_only = (select_target(decoder, "auto", MoEShape(4, n, 4, width - 4 * n)).is_tiny_onn for n in (24, 32))
    return (
        ("n=32", "always_on=0", "assemble.pad_to=40")
        if own and not routed_only
        else ("n=24", f"always_on={max(32, width - 96)}")
    )


def _described(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(last.filename).name}:{last.lineno})"


@contextmanager
def _quiet(log: Path):
    """Output goes to a file; a call that takes too long ends; garbage collections need not search the imports."""
    gc.freeze()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(PATIENCE)
    try:
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(*_: object) -> None:
    raise TimeoutError(f"more than {PATIENCE} s")
