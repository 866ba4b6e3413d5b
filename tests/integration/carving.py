"""The carves that the tests of this folder read, how to make one, and how to reopen them in a fresh process."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from pico import write_pico
from transformers import AutoTokenizer

from models.source import EMBEDDED
from pipeline.cli import run_command
from stages.evaluate.config import BASELINES
from stages.text.config import DataConfig
from stages.text.sequences import load_text

ALL_ON = ("stage=assemble", "always_on=0", "assemble.logit_std=0")
PARTITION = ("experts=5", "n=8", "top_k=5")  # 5·8 = F
COPIES = ("experts=6", "n=7", "top_k=6")  # 6·7 > F, and no multiple of 8
EVERY_BASELINE = f"evaluate.baselines=[{','.join(BASELINES)}]"

# All experts on: equal to the dense model.
EXACT = {
    "qwen3": ("qwen3", *ALL_ON, *PARTITION),
    "qwen2-always-on": ("qwen2", *ALL_ON, "experts=4", "n=8", "top_k=4", "always_on=8"),
    "qwen2-glm4-copies": ("qwen2", *ALL_ON, *COPIES, "assemble.target=glm4_moe"),
    "llama-copies": ("llama", *ALL_ON, *COPIES, "stage=project"),
}
# Some experts on. None is the embedded model.
SPARSE = {
    "embedded": (None, "stage=all", "project.penalties=[0.1]", "evaluate.baselines=[static_mask,random_router]"),
    "qwen2-chain": ("qwen2", "stage=all", "experts=4", "n=8", "top_k=2", "always_on=8", EVERY_BASELINE),
    "llama-dropped": ("llama", "stage=project", "experts=4", "n=8", "top_k=2", "always_on=0"),
    "qwen3-hundred": ("qwen3", "stage=assemble", "experts=100", "n=3", "top_k=2", "always_on=0"),
}
CARVES = EXACT | SPARSE

# Every target with the default mode, some experts on.
FEW = ("stage=project", "experts=4", "n=8", "top_k=2", "assemble.router_tokens=256")
TARGETS = {
    "qwen3_moe": ("qwen3", *FEW, "always_on=0"),
    "qwen2_moe": ("qwen2", *FEW, "always_on=8"),
    "mixtral": ("llama", *FEW, "always_on=0"),
    "glm4_moe": ("qwen3", *FEW, "always_on=8"),
    "flex_olmo": ("olmo2", *FEW, "always_on=0"),
    "granitemoe": ("granite", *FEW, "always_on=0"),
    "granitemoeshared": ("granite", *FEW, "always_on=8"),
    "tiny_onn": ("llama", *FEW, "always_on=8", "assemble.target=tiny_onn"),
}
# The embedded model with softmax gates; and almost constant gates, whose tiny logits low precision loses.
OTHERS = {
    "tiny-logits": ("qwen3", "stage=all", "experts=4", "n=8", "top_k=2", "always_on=8", "assemble.logit_std=0.001"),
    "dense-layer": (
        "llama",
        "stage=all",
        "experts=4",
        "n=8",
        "active=0.75",
        "always_on=4",
        "dense_layers=[1]",
        "assemble.target=tiny_onn",
        EVERY_BASELINE,
    ),
    "embedded-softmax": (None, "stage=project", "always_on=0", "top_k=8", "project.penalties=[0.1]"),
}


@dataclass(frozen=True)
class Carve:
    """One run: the dense checkpoint, and the published folder of the last stage that wrote a checkpoint."""

    dense: Path
    folder: Path
    data: DataConfig

    def stage(self, name: str) -> Path:
        """The published folder of an earlier stage, found through the manifests."""
        folder = self.folder
        while folder.parent.name != name:
            parents = self._parents(folder)
            step = name if name in parents else list(parents)[-1]
            folder = folder.parents[1] / step / parents[step][:16]
        return folder

    @property
    def evaluation(self) -> Path:
        """The published folder of evaluate."""
        (folder,) = (
            folder
            for folder in (self.folder.parents[1] / "evaluate").iterdir()
            if self.folder.name in [parent[:16] for parent in self._parents(folder).values()]
        )
        return folder

    @staticmethod
    def _parents(folder: Path) -> dict[str, str]:
        parents: dict[str, str] = json.loads((folder / "manifest.json").read_text())["recipe"]["parents"]
        return parents

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Stage → the checkpoint it wrote."""
        names = ("assemble", "project") if self.folder.parent.name == "project" else ("assemble",)
        return {name: self.stage(name) / "checkpoint" for name in names}


def make_carve(folder: Path, text: Path, source: str | None, *words: str) -> Carve:
    """Run the command for a source in `folder`."""
    outputs = folder / f"outputs-{source}"
    given = words_of_embedded() if source is None else words_of_pico(folder / source, text)
    quick = ["cluster.map=none", "evaluate.speed_tokens=0", f"output_dir={outputs}"]
    quick += ["evaluate.samples=0"] if source else []
    gc.freeze()  # every stage starts with a garbage collection, which need not search the imported modules
    assert run_command([*given, *quick, *words]) == 0
    latest = outputs / "latest"
    data = DataConfig(**OmegaConf.to_container(OmegaConf.load(latest / "config.yaml").data))
    dense = EMBEDDED if source is None else folder / source
    return Carve(dense, (latest / "checkpoint").resolve().parent, data)


def words_of_embedded() -> list[str]:
    return [
        *("model=embedded", "data.tokens=1024", "data.heldout_tokens=1024", "vocabulary.tokens=512"),
        *("project.gradient_tokens=256", "project.descent_steps=4", "project.rounds=1", "project.router_steps=20"),
    ]


def words_of_pico(source: Path, text: Path) -> list[str]:
    return [
        *("model=local", f"model.path={source}", f"model.label={source.name}"),
        *("data=text", f"data.path={text}", "data.tokens=900", "data.heldout_tokens=300"),
        *("data.max_length=50", "data.heldout_share=0.3", "scan.batch_tokens=100"),
        *("vocabulary.tokens=100", "project.descent_steps=4", "project.rounds=1", "project.router_steps=20"),
    ]


def published(outputs: Path, stage: str, label: str = "pico") -> Path:
    """The one published folder of a stage."""
    (folder,) = (outputs / "artifacts" / label / stage).glob("[!.]*")
    return folder


def similar_lines(count: int) -> list[str]:
    """Similar but different sentences."""
    return [f"{number} sparrows met {number * 7 % 31} finches near house {number % 9}." for number in range(count)]


def write_source(folder: Path, lines: int) -> list[str]:
    """Write a model, a text and a short held-out text; returns the words that name them."""
    write_pico(folder / "pico", "qwen3", tokenizer=True)
    (folder / "text.txt").write_text("\n\n".join(similar_lines(lines)))
    (folder / "heldout.txt").write_text("No bird was met.")
    return [
        *("model=local", f"model.path={folder / 'pico'}", "model.label=pico"),
        *("data=text", f"data.path={folder / 'text.txt'}", f"data.heldout_path={folder / 'heldout.txt'}"),
    ]


def reopen(carves: Mapping[str, Carve], folder: Path, *, remote: bool = False) -> dict[str, dict[str, dict]]:
    """Open every checkpoint with transformers alone in one fresh process: carve → dense or stage → findings.

    Args:
        carves: Carves by name.
        folder: An empty folder to work in.
        remote: Trust the checkpoint's code.
    """
    cases = {name: describe(carve) | {"remote": remote} for name, carve in carves.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("reopen_carves.py")
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        [sys.executable, "-W", "error", script, folder], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


def describe(carve: Carve) -> dict[str, object]:
    """Paths and held-out sequences for the fresh process."""
    sequences = load_text(carve.data, AutoTokenizer.from_pretrained(carve.dense), "heldout").sequences
    assert all(sequence.labels == sequence.ids for sequence in sequences)
    return {
        "dense": str(carve.dense),
        "checkpoints": {stage: str(path) for stage, path in carve.checkpoints.items()},
        "sequences": [sequence.ids for sequence in sequences],
    }
