"""All settings, the settings each stage reads, and composition of settings from conf/ and the command line."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import stages
from instruments.errors import ConfigError, redact
from instruments.tensor_dump.config import read_variable
from models.config import PER_LAYER, TOPOLOGIES, ModelConfig
from pipeline.help import CONF, find_workspace
from stages.accumulators.config import StoreConfig
from stages.artifacts.job import Table
from stages.assemble.config import AssembleConfig
from stages.calibration.config import VocabularyConfig
from stages.cluster.config import ClusterConfig
from stages.diagnose.config import CHECKS, DiagnoseConfig
from stages.dump.config import DumpStageConfig
from stages.evaluate.config import EvaluateConfig
from stages.project.config import ProjectConfig
from stages.scan.config import ScanConfig
from stages.score.config import ScoreConfig
from stages.text.config import DataConfig
from stages.train.config import TrainConfig

ALL = "all"
# OmegaConf has no type for a list or a word: in `Settings` this value is None.
AUTO_LAYERS = "dense_layers", "auto"
# Flags that print settings and run nothing.
SHOWING = {"--cfg", "-c", "--info", "-i"}


@dataclass(frozen=True)
class Stage:
    """One stage; its code is in `stages/<name>/`."""

    name: str
    parents: tuple[str, ...]
    nodes: tuple[str, ...]  # keyword arguments of its `run`; only these settings enter its fingerprint
    shared: bool = False  # all workers take part; otherwise the leading worker alone
    reads_heldout: bool = False  # needs held-out text
    fixed_heldout: bool = False  # the fingerprint covers the settings of the held-out text
    samples: bool = False  # reads the first `data.sample_tokens` of the calibration text; otherwise all of it
    kept: bool = True  # False: reads user files that no fingerprint covers, so it runs at every request

    @property
    def version(self) -> int:
        """The VERSION of `stages/<name>/config.py`; increased there when the same settings give another result."""
        version: int = import_module(f".{self.name}.config", stages.__name__).VERSION
        return version

    @property
    def run(self) -> Callable[..., Table]:
        """The entry point; imported on first use, since it loads torch."""
        run: Callable[..., Table] = import_module(f".{self.name}.stage", stages.__name__).run
        return run


CHAIN = (
    Stage("scan", (), ("model", "data", "store", "scan", "seed"), shared=True, samples=True),
    Stage("score", ("scan",), ("score", "seed")),
    Stage("cluster", ("scan", "score"), ("model", "data", "vocabulary", "cluster", "shape", "seed"),
          shared=True, samples=True),
    Stage("extract", ("cluster",), ("model",)),
    Stage("assemble", ("cluster", "extract"), ("model", "data", "vocabulary", "assemble", "shape", "seed"),
          shared=True, samples=True),
    Stage("project", ("cluster", "extract", "assemble"),
          ("model", "data", "vocabulary", "assemble", "project", "shape", "seed"), shared=True),
    # Held-out losses are only recorded: more held-out text for evaluate needs no new training.
    Stage("train", ("project",), ("model", "data", "assemble", "train", "shape", "seed"),
          shared=True, reads_heldout=True),
    Stage("evaluate", ("scan", "cluster", "assemble", "project"),
          ("model", "data", "vocabulary", "project", "evaluate", "shape", "seed"),
          shared=True, reads_heldout=True, fixed_heldout=True),
    Stage("layers", ("scan",), ("model", "data", "active")),
    Stage("dump", (), ("model", "data", "dump")),
    Stage("diagnose", (), ("model", "data", "check", "diagnose", "seed"), kept=False),
)  # fmt: skip
STAGES = {stage.name: stage for stage in CHAIN}


@dataclass
class Settings:
    """The dials, and one node per configuration group. conf/config.yaml explains each dial."""

    stage: str = field(default=ALL, metadata={"choices": (ALL, *STAGES)})
    check: str = field(default=CHECKS[0], metadata={"choices": CHECKS})
    topology: str = field(default=PER_LAYER, metadata={"choices": TOPOLOGIES})
    experts: int | None = field(default=None, metadata={"minimum": 1})
    n: int | None = field(default=None, metadata={"minimum": 1})
    top_k: int | None = field(default=None, metadata={"minimum": 1})
    always_on: int | None = field(default=None, metadata={"minimum": 0})
    active: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    dense_layers: list[int] | None = field(default_factory=list)  # None: auto
    seed: int = field(default=0, metadata={"minimum": 0, "maximum": 2**32 - 1})
    fresh: bool = False
    plan: bool = False
    output_dir: str = "outputs"

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    scan: ScanConfig = field(default_factory=ScanConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    assemble: AssembleConfig = field(default_factory=AssembleConfig)
    project: ProjectConfig = field(default_factory=ProjectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    dump: DumpStageConfig = field(default_factory=DumpStageConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this run, and all whose results they read."""
        return with_ancestors(self.stage, self.evaluate.checkpoint)

    def involves(self, stage: str) -> bool:
        """Whether this run uses `stage` or its result."""
        return stage in {each.name for each in self.stages}


def unneeded(node: object) -> dict[str, str]:
    """Settings of a dataclass that have no effect → the name of the setting of the same node that disables them.

    A field's metadata `needs` names other fields, and the values with which it is read: see `enables`. A named field
    that is itself without effect counts as its default. If a field that `or` names is enabled, all are read.
    """
    found: dict[str, str] = {}
    for spec in fields(node):  # type: ignore[arg-type]
        if any(enables(getattr(node, name), wanted) for name, wanted in spec.metadata.get("or", {}).items()):
            continue
        for name, wanted in spec.metadata.get("needs", {}).items():
            if not enables(getattr(type(node)() if name in found else node, name), wanted):
                found[spec.name] = name
                break
    return found


def enables(value: object, wanted: object) -> bool:
    """Whether a value is the `wanted` one, or one of several; True: all but 0, None, false and ""."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return value in wanted if isinstance(wanted, tuple | frozenset) else value == wanted


SCHEMA = OmegaConf.structured(Settings)  # built once: copying it in a merge takes a quarter of the time

# evaluate reads the checkpoint of one of the first two. stage=all trains only if the trained checkpoint is evaluated,
# and never runs layers, dump and diagnose.
PROJECTED, TRAINED, LOOKING, LAYERS = "project", "train", ("dump", "diagnose"), "layers"
_ALWAYS = frozenset(STAGES) - {TRAINED, LAYERS, *LOOKING}


def asked_stages(name: str, evaluated: str = PROJECTED) -> tuple[Stage, ...]:
    """The stages that `stage=name` requests; all: every stage that the `evaluated` checkpoint needs."""
    asked = {evaluated, *_ALWAYS} if name == ALL else {name}
    return tuple(stage for stage in _chain(evaluated) if stage.name in asked)


def _chain(evaluated: str) -> list[Stage]:
    """All stages; evaluate also reads the checkpoint of the stage `evaluated`."""
    return [
        replace(stage, parents=tuple(dict.fromkeys((*stage.parents, evaluated)))) if stage.name == "evaluate" else stage
        for stage in CHAIN
    ]


def with_ancestors(name: str, evaluated: str = PROJECTED) -> tuple[Stage, ...]:
    """The stages that `stage=name` requests and all their ancestors, in the order of the chain."""
    wanted = {stage.name for stage in asked_stages(name, evaluated)}
    for stage in reversed(chain := _chain(evaluated)):
        if stage.name in wanted:
            wanted.update(stage.parents)
    return tuple(stage for stage in chain if stage.name in wanted)


@cache
def _register_schema() -> None:
    """Register the schema as `schema`, and `${workspace:}` and `${variable:NAME,default}`, of the environment."""
    # Without types, which `to_settings` checks once: checking them in every merge is slow.
    ConfigStore.instance().store("schema", node=OmegaConf.to_container(SCHEMA))
    OmegaConf.register_new_resolver("workspace", lambda: str(find_workspace()), replace=True)
    OmegaConf.register_new_resolver(
        "variable", lambda name, default: read_variable(name, os.environ) or default, replace=True
    )


# Where settings are written.
PLACES = f"the files under {CONF} and the command line"
WORDS = {int: "integer", float: "number", str: "text", bool: "boolean"}
BOOLEANS = {"true", "false", "yes", "no", "on", "off"}


def find_wrong_values(kind: Any, value: object, name: str = "") -> Iterator[str]:  # noqa: ANN401 - an annotation
    """What OmegaConf accepts at any depth of a setting and no code can use, each with the setting's name.

    It takes every number, also in quotes, for a boolean, lists and dictionaries for numbers in a list, and ??? for the
    default.
    """
    if isinstance(kind, UnionType):  # X | None
        kind = get_args(kind)[0]
    if value == MISSING:
        yield f"{name}={value} is no value"
    elif is_dataclass(kind) and isinstance(value, dict):
        for key, inner in get_type_hints(kind).items():
            if key in value:
                yield from find_wrong_values(inner, value[key], f"{name}.{key}".lstrip("."))
    elif get_origin(kind) is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from find_wrong_values(get_args(kind)[0], item, f"{name}.{number}")
    elif isinstance(value, list | dict):
        yield f"{name}={value} is no {WORDS.get(kind, kind)}"
    elif kind is bool and str(value).lower() not in BOOLEANS and "${" not in str(value):
        yield f"{name}={value} is neither true nor false"


def to_settings(config: DictConfig) -> Settings:
    """Resolve a composed configuration once; all other code sees only dataclasses. Raises ConfigError: wrong values."""
    resolved = OmegaConf.to_container(config, resolve=True)
    if wrong := [*find_wrong_values(Settings, resolved)]:
        raise ConfigError("; ".join(wrong), where=PLACES, do="values of the kinds in the files under conf/")
    name, word = AUTO_LAYERS
    if isinstance(resolved, dict) and resolved.get(name) == word:
        resolved[name] = None
    # Resolving does not check types (`${...}` may give a text for a list); the merge with the schema does.
    settings = OmegaConf.to_object(OmegaConf.merge(SCHEMA, resolved))
    assert isinstance(settings, Settings)
    return settings


# What Hydra raises about settings, in addition to its own errors.
HYDRA_FAULTS = (AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError)


def compose(words: Sequence[str]) -> tuple[Settings, Path]:
    """The settings that the words select, and the run folder. Raises ConfigError: see `composition_errors`."""
    _register_schema()
    # A program or notebook that has its own Hydra goes on with it.
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    with composition_errors(), ExitStack() as after:
        after.callback(lambda: setattr(GlobalHydra.instance(), "hydra", outer))
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            try:
                config = hydra.compose("config", list(words), return_hydra_config=True)
            except HYDRA_FAULTS as error:
                raise HydraException(str(error)) from error
        folder = Path(config.hydra.run.dir)
        with open_dict(config):
            del config["hydra"]
        return to_settings(config), folder


def run_hydra(task: Callable[[Settings, Path, Sequence[str]], object]) -> None:
    """Let Hydra read the command line (sweeps with `-m`, `--cfg job`, `--info`) and run the task for each job.

    Raises ConfigError: see `composition_errors`; UserError: the task failed; all other jobs of a sweep still ran.
    """
    _register_schema()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise errors instead of ending the process
    started = False

    @hydra.main(str(CONF), "config", version_base="1.3")
    def main(config: DictConfig) -> None:
        nonlocal started
        started, job = True, HydraConfig.get()
        if (sweep := Path(job.sweep.dir) / "multirun.yaml").is_file():  # Hydra wrote it, passwords included
            sweep.write_text(redact(sweep.read_text(encoding="utf-8")), encoding="utf-8")
        task(to_settings(config), Path(job.runtime.output_dir), job.overrides.task)

    shown = StringIO()
    with composition_errors(), redirect_stdout(shown) if SHOWING & {*sys.argv} else nullcontext():
        try:
            main()
        except HYDRA_FAULTS as error:
            if started:
                raise
            raise HydraException(str(error)) from error
    sys.stdout.write(redact(shown.getvalue()))


@contextmanager
def composition_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf about the files under conf/ into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        what = " ".join(str(error).strip().splitlines()[:2])  # two lines: Hydra's action, and the fault
        raise ConfigError(what, where=PLACES, do="python -m pipeline --cfg job lists the settings") from error
