"""Plans a run: which stages have to run, and which published results they use."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from instruments.cpu import has_amx
from instruments.errors import CheckpointError, ContractError, DataError, some
from models.config import ModelConfig, is_on_host
from models.source import EMBEDDED, source_cache_key
from models.targets.config_json import source_dtype
from pipeline.artifacts import (
    MANIFEST,
    READ,
    UNREADABLE,
    FileHashes,
    Manifest,
    artifact_folder,
    is_complete,
    tensors_hash,
)
from pipeline.check import Checked, training_text
from pipeline.disk import expected_bytes
from pipeline.resources import estimate_seconds, peak_bytes, room_errors, temporary_bytes
from pipeline.settings import CHAIN, TRAINED, Stage, asked_stages, unneeded
from stages.accumulators.redis_connection import check_store
from stages.artifacts.job import Table
from stages.artifacts.rendering import in_mib, in_time
from stages.calibration.config import VocabularyConfig
from stages.text.config import DataConfig, TrainingData, calibration_only, list_sources, sampled
from stages.text.hub import require_hub
from stages.text.sources import calibration_cache_key, data_cache_key
from stages.train.config import TrainConfig

log = logging.getLogger(__name__)

# A reason to run a stage.
STALE = "a result that it reads has changed"
CHANGED = "changed settings or inputs"  # `describe_change` says which
# Nodes that name files or datasets, whose content enters the recipe as well.
NODES_WITH_CONTENT = {"model": "the dense model", "data": "the text", "train": "the text to train on"}


def plain_settings(node: object) -> object:
    """A node as JSON values, without settings that have no effect and fields with `metadata={"fingerprint": False}`.

    Such a field changes where, how fast or how safely a stage runs, never its result.
    """
    if isinstance(node, list):
        return [plain_settings(item) for item in node]
    if not is_dataclass(node):
        return node
    left_out = unneeded(node)
    counted = [
        spec.name for spec in fields(node) if spec.metadata.get("fingerprint", True) and spec.name not in left_out
    ]
    return {name: plain_settings(getattr(node, name)) for name in counted}


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of the recipe, independent of the order of its keys."""
    return sha256(json.dumps(recipe, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class Step:
    """One stage with one fingerprint."""

    stage: Stage
    fingerprint: str
    recipe: Mapping[str, Any]
    folder: Path  # of its published result, which may not exist yet
    inputs: Mapping[str, object]  # keyword arguments of its run
    parents: Mapping[str, Path]  # stage → folder
    expected_bytes: int
    due: bool = False  # has to run
    fresh: bool = False  # starts over, without its result and unfinished work
    reason: str = ""  # why it is due, or is not


def make_plan(checked: Checked) -> list[Step]:
    """Steps for the requested stages and those they use, in the order of the chain. Raises: see `require_means`."""
    settings = checked.settings
    chain, asked = settings.stages, asked_stages(settings.stage, settings.evaluate.checkpoint)
    wanted = {stage.name for stage in asked}
    fresh = {stage.name for stage in asked if settings.fresh or not stage.kept}
    results = artifact_folder(Path(settings.output_dir), settings.model.label, "", "")
    published = {stage.name for stage in chain if any(results.glob(f"{stage.name}/[!.]*/{MANIFEST}"))}
    # Hashing a model takes long and writes a file, so stages that are due with any fingerprint are checked before it.
    surely_due = select_stages(wanted, published - fresh, chain)[1]
    require_means(checked, surely_due)
    steps, reasons = make_steps(checked), dict[str, str]()
    for name, step in steps.items():
        if name in fresh:
            reasons[name] = "fresh=true" if settings.fresh else "runs at every request"
        elif is_stale(step) or any(reasons.get(parent) == STALE for parent in step.parents):
            reasons[name] = STALE
        elif not is_complete(step.folder):
            reasons[name] = CHANGED if name in published else "no result yet"
    used, due = select_stages(wanted, steps.keys() - reasons.keys(), chain)
    if due != surely_due:
        require_means(checked, due)
    reasons |= {name: describe_change(steps[name]) for name in due if reasons.get(name) == CHANGED}
    return [
        replace(steps[name], due=name in due, fresh=name in fresh, reason=reasons.get(name, ""))
        for name in steps
        if name in used
    ]


def describe_change(step: Step) -> str:
    """In which settings and inputs the step differs from the published result of its stage that is nearest to it."""
    found, now = [], json.loads(json.dumps(step.recipe))
    for path in step.folder.parent.glob(f"[!.]*/{MANIFEST}"):
        with suppress(ContractError, *UNREADABLE):  # damaged, or removed meanwhile
            found.append(_find_changes(Manifest.read(path.parent, remedy="").recipe, now))
    changed = min(found, key=len, default=["its results, which cannot be read"])
    return f"changed {some(changed, 3, ', ')}" if changed else "another result of a stage before it"


def _find_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = []
    for node, words in NODES_WITH_CONTENT.items():
        files, read = then["identity"].get(node, {}), now["identity"].get(node, {})
        if files != read:
            alike = {**files, "heldout": read.get("heldout")} == {**read, "heldout": read.get("heldout")}
            changed.append("the held-out text" if alike else words)
    changed += _find_differences(then["settings"], now["settings"])
    return changed + (["the program"] if then["version"] != now["version"] else [])


def _find_differences(then: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> list[str]:
    """Names of the settings that differ; of those that only one has, if there are no others."""
    names = []
    for name in then.keys() & now.keys():
        if isinstance(then[name], dict) and isinstance(now[name], dict):
            names += _find_differences(then[name], now[name], "" if name == "shape" else f"{place}{name}.")
        elif then[name] != now[name]:
            names.append(f"{place}{name}")
    return sorted(names or [f"{place}{name}" for name in then.keys() ^ now.keys()])


def describe_plan(checked: Checked, steps: Sequence[Step]) -> Table:
    """The table of `plan=true`: which stages run, why, and what they need."""
    rows, total = [], 0.0
    for step in steps:
        name, what, needs = step.stage.name, f"runs: {step.reason}" if step.due else "kept", ["-"] * 4
        if step.due:
            seconds = estimate_seconds(name, checked)
            total += seconds
            sizes = peak_bytes(name, checked), step.expected_bytes, temporary_bytes(name, checked)
            needs = [*map(in_mib, sizes), in_time(seconds)]
        rows.append([name, what, *needs])
    notes = [
        f"all stages {in_time(total)}; times by last runs of models of this size in output_dir, or a coarse default",
        "memory per process; temporary files are on the disk of output_dir while the stage runs",
    ]
    return Table("plan", ("stage", "plan", "memory", "result", "temporary", "time"), rows, notes)


def make_steps(checked: Checked) -> dict[str, Step]:
    """Stage → step, for the requested stages and all their ancestors, in the order of the chain."""
    settings, shape = checked.settings, checked.shape
    nodes = {**vars(settings), "shape": shape}
    if shape is not None and shape.pooled:
        # Its experts serve all layers, and random tokens would favour the first at the others' cost.
        nodes["vocabulary"] = VocabularyConfig(tokens=0)
    output_dir = Path(settings.output_dir).absolute()
    hash_of = FileHashes(output_dir)
    source_key = source_cache_key(settings.model, hash_of)
    text_key = data_cache_key(settings.data, hash_of)  # once: a dataset of the hub is asked for its commit
    text_keys = {True: text_key, False: calibration_cache_key(settings.data, text_key, hash_of.recall)}
    counted = nodes | {"model": resolve_model(checked)}
    # Stages get the commits that the plan has found: a branch of the hub may move during a run.
    given = {**nodes, "model": replace(settings.model, revision=source_key.get("commit", settings.model.revision))}
    text = pin_text(settings.data, text_key["sources"])
    texts = {True: sampled(text), False: text}  # one object for all stages, so that its text is tokenized once
    training = training_text(settings)
    training_key = {} if training is None else text_cache_key(training, hash_of, fixed_heldout=True)
    if training is not None:
        pinned = pin_text(training, training_key["sources"])
        given["train"] = replace(settings.train, sources=pinned.sources)
    steps: dict[str, Step] = {}
    for stage in settings.stages:
        parents = {name: steps[name].fingerprint for name in stage.parents}
        data = sampled(settings.data) if stage.samples else settings.data
        read = data if stage.fixed_heldout else calibration_only(data)
        cache_keys = {"model": source_key, "data": text_keys[stage.fixed_heldout], "train": training_key}
        stated = counted | {"data": read}
        recipe = {  # all inputs that affect the result
            "stage": stage.name,
            "version": stage.version,
            "settings": {name: plain_settings(stated[name]) for name in stage.nodes},
            "identity": {name: cache_keys[name] for name in stage.nodes if cache_keys.get(name)},
            "parents": parents,
        }
        address = fingerprint(recipe)
        steps[stage.name] = Step(
            stage,
            address,
            recipe,
            folder=artifact_folder(output_dir, settings.model.label, stage.name, address),
            inputs={node: texts[stage.samples] if node == "data" else given[node] for node in stage.nodes},
            parents={name: steps[name].folder for name in stage.parents},
            expected_bytes=expected_bytes(stage.name, checked.source, shape, settings.assemble),
        )
    hash_of.save()
    return steps


def text_cache_key(data: DataConfig, hash_of: FileHashes, *, fixed_heldout: bool) -> dict[str, object]:
    """What the text of a stage depends on. Of a training's own text, the key of `data` covers what is held out."""
    if isinstance(data, TrainingData):
        return data_cache_key(replace(data, heldout_path=None), hash_of)
    key = data_cache_key(data, hash_of)
    return key if fixed_heldout else calibration_cache_key(data, key, hash_of.recall)


def pin_text(data: DataConfig, keys: Any) -> DataConfig:  # noqa: ANN401 - of `data_cache_key`, one per source
    """The settings of the text with the commits of the hub's datasets, where known, as their revisions."""
    keys = [key["text"] if isinstance(key, dict) else key for key in keys]  # without the chat template
    if data.kind == "hub":
        return replace(data, revision=keys[0]) if isinstance(keys[0], str) else data
    pairs = zip(data.mixed.values(), keys, strict=False)
    pinned = [replace(source, revision=key) if isinstance(key, str) else source for source, key in pairs]
    return replace(data, sources=pinned or data.sources)


def resolve_model(checked: Checked) -> ModelConfig:
    """The model's settings with the device's type and the number format that the model is loaded in.

    The format of dtype=auto depends on the device, see `resolve_dtype`; auto remains if config.json names none.
    """
    model, on_host = checked.settings.model, is_on_host(checked.settings.model)
    device = "cpu" if on_host else model.device.replace("auto", "cuda").partition(":")[0]
    own = "float32" if on_host else source_dtype(checked.source.config_json) or "auto"
    dtype = own if model.dtype == "auto" else model.dtype
    rounded = model.rounded_products and (not on_host or has_amx())  # without effect on other CPUs
    return replace(model, device=device, dtype=dtype, rounded_products=rounded)


def check_sources(step: Step, hash_of: FileHashes, *, done: bool) -> None:
    """Check the local files that a stage reads against the plan; text that changes until it is `done` is a warning.

    Raises CheckpointError: the dense model's files are not those of the plan; DataError: nor those of the text.
    """
    planned, do = step.recipe["identity"], "the same command again, which starts with the files as they are now"
    model, data, train = (step.inputs.get(name) for name in NODES_WITH_CONTENT)
    # A commit of the hub does not change.
    if isinstance(model, ModelConfig) and model.kind != "hub":
        now, then = source_cache_key(model, hash_of)["files"], planned["model"]["files"]
        if changed := sorted({name for name, _ in now.items() ^ then.items()}):
            what = "the files of the dense model were changed during this run: its stages would read two models"
            where = f"stage={step.stage.name}, {model.path or EMBEDDED}: {some(changed)}"
            raise CheckpointError(what, where=where, do=do)
    if not isinstance(data, DataConfig):
        return
    texts = [data, train.own_text(data) if isinstance(train, TrainConfig) else None]
    for text in filter(None, texts):
        if any(source.kind == "hub" for source in list_sources(text, "calibration")):
            continue
        try:
            unchanged = text_cache_key(text, hash_of, fixed_heldout=step.stage.fixed_heldout) == planned[text.node]
        except DataError:  # removed
            unchanged = False
        if unchanged:
            continue
        what = "files of the text were changed during this run: its stages would read two texts"
        if not done:
            raise DataError(what, where=f"stage={step.stage.name}", do=do)
        log.warning("stage=%s may have read other text than planned: %s; %s", step.stage.name, what, do)


def published_recipe(step: Step) -> dict[str, Any]:
    """The recipe with the hashes of the parents' tensors. Raises ContractError: a parent's manifest is not readable."""
    parents = {name: folder for name, folder in step.parents.items() if is_complete(folder)}
    return {**step.recipe, READ: {name: tensors_hash(folder) for name, folder in parents.items()}}


def is_stale(step: Step) -> bool:
    """Whether the result was computed from other tensors than its parents hold now."""
    with suppress(ContractError):  # no result, or a damaged one, which is reported when it is verified
        read, now = Manifest.read(step.folder, remedy="").recipe.get(READ, {}), published_recipe(step)[READ]
        return any(read[name] != now[name] for name in read.keys() & now.keys())
    return False


def find_checkpoint(steps: Sequence[Step]) -> Path | None:
    """The checkpoint that a run wrote or read last; None if it has none."""
    if named := getattr(steps[-1].inputs.get("diagnose"), "checkpoint", None):
        return Path(named).resolve()
    folders: dict[str, Path] = {}
    for step in steps:
        folders |= {**step.parents, step.stage.name: step.folder}
    owner = next((name for name in ("train", "project", "assemble") if name in folders), None)
    return folders[owner] / "checkpoint" if owner and (folders[owner] / "checkpoint").is_dir() else None


def select_stages(asked: set[str], complete: set[str], stages: Sequence[Stage] = CHAIN) -> tuple[set[str], set[str]]:
    """The used stages (requested ones and parents of due ones), and the due stages (used ones without a result)."""
    used, due = set(asked), set()
    for stage in reversed(stages):
        if stage.name in used and stage.name not in complete:
            due.add(stage.name)
            used.update(stage.parents)
    return used, due


def require_means(checked: Checked, due: Collection[str]) -> None:
    """Raises ConfigError or DataError: due stages lack disk space, their device, their store or the hub."""
    settings, stages = checked.settings, [stage for stage in CHAIN if stage.name in due]
    if not settings.plan:  # which names what another machine must have
        for error in room_errors(checked, [stage.name for stage in stages]):
            raise error
    if settings.model.device not in {"auto", "cpu"} and any("model" in stage.nodes for stage in stages):
        from models.loading import resolve_device  # noqa: PLC0415 - loads torch

        resolve_device(settings.model)
    if "scan" in due:
        check_store(settings.store)
    if any("data" in stage.nodes for stage in stages):
        texts = [settings.data, training_text(settings) if TRAINED in due else None]
        require_hub(source for text in filter(None, texts) for source in list_sources(text, "calibration"))
