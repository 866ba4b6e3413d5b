"""The chain as data: what each stage starts from and which settings it reads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from stages.artifacts.job import Table


@dataclass(frozen=True)
class Stage:
    """One stage; its code is in `stages/<name>/`.

    `nodes` are the keyword arguments of its `run`, and the only settings that enter its fingerprint. Where it is
    `shared`, every process that torchrun started takes part; the others are run by the leading one alone. How much
    held-out text there is counts only for one that `reads_heldout`: the others are found again. One that is not
    `kept` looks at what no fingerprint covers, such as files of the user's, and is run whenever it is asked for.
    """

    name: str
    parents: tuple[str, ...]
    nodes: tuple[str, ...]
    shared: bool = False
    reads_heldout: bool = False
    kept: bool = True
    unread: tuple[str, ...] = ()  # nodes that are handed over and not looked at, for the settings of a run

    @property
    def version(self) -> int:
        """The VERSION of `stages/<name>/config.py`; raised there when the same settings give another result."""
        version: int = import_module(f"stages.{self.name}.config").VERSION
        return version

    @property
    def run(self) -> Callable[..., Table]:
        """The entry point, imported only now: it loads torch."""
        run: Callable[..., Table] = import_module(f"stages.{self.name}.stage").run
        return run


CHAIN = (
    Stage("scan", parents=(), nodes=("model", "data", "store", "scan", "seed"), shared=True),
    Stage("score", parents=("scan",), nodes=("score", "seed")),
    Stage("cluster", parents=("scan", "score"), nodes=("model", "data", "vocabulary", "cluster", "shape", "seed")),
    Stage("extract", parents=("cluster",), nodes=("model", "extract", "shape")),
    Stage(
        "assemble", parents=("cluster", "extract"), nodes=("model", "data", "vocabulary", "assemble", "shape", "seed")
    ),
    Stage(
        "project",
        parents=("cluster", "extract", "assemble"),
        nodes=("model", "data", "vocabulary", "assemble", "project", "shape", "seed"),
    ),
    Stage(
        "train",
        parents=("project",),
        nodes=("model", "data", "assemble", "train", "shape", "seed"),
        shared=True,
        reads_heldout=True,
    ),
    Stage(
        "evaluate",
        parents=("scan", "cluster", "assemble", "project"),
        nodes=("model", "data", "vocabulary", "project", "evaluate", "shape", "seed"),
        reads_heldout=True,
    ),
    Stage("dump", parents=(), nodes=("model", "data", "dump")),
    Stage("diagnose", parents=(), nodes=("model", "data", "check", "diagnose", "seed"), kept=False),
)
STAGES = {stage.name: stage for stage in CHAIN}
ALL = "all"


# evaluate looks at one of the first two. stage=all trains only where the trained checkpoint is evaluated, and never
# runs the stages that look into a model.
PROJECTED, TRAINED, LOOKING = "project", "train", ("dump", "diagnose")
_ALWAYS = frozenset(STAGES) - {TRAINED, *LOOKING}


@dataclass(frozen=True)
class Uses:
    """Which results the stages of a run read of each other."""

    evaluated: str = PROJECTED  # evaluate looks at the checkpoint of this stage
    score: bool = True  # cluster ranks neurons by score
    passes: bool = True  # cluster passes the calibration text


def asked_stages(name: str, uses: Uses = Uses()) -> tuple[Stage, ...]:
    """The stages that `stage=name` asks for; all: every stage that the evaluated checkpoint needs."""
    served = {uses.evaluated, *_ALWAYS} - (set() if uses.score else {"score"})
    chosen = [stage for stage in CHAIN if name == stage.name or (name == ALL and stage.name in served)]
    return tuple(reading(stage, uses) for stage in chosen)


def reading(stage: Stage, uses: Uses) -> Stage:
    """The stage with the parents and nodes that it looks at."""
    if stage.name == "evaluate" and uses.evaluated not in stage.parents:
        return replace(stage, parents=(*stage.parents, uses.evaluated))
    if stage.name == "cluster":
        parents = tuple(name for name in stage.parents if uses.score or name != "score")
        return replace(stage, parents=parents, unread=() if uses.passes else ("data", "vocabulary"))
    return stage


def with_ancestors(name: str, uses: Uses = Uses()) -> tuple[Stage, ...]:
    """The stages that `stage=name` asks for and all they start from, in the order of the chain."""
    stages = [reading(stage, uses) for stage in CHAIN]
    wanted = {stage.name for stage in asked_stages(name, uses)}
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted.update(stage.parents)
    return tuple(stage for stage in stages if stage.name in wanted)
