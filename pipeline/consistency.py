"""Errors of valid settings that contradict each other, the source model or the number of workers."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from instruments.errors import ConfigError
from instruments.tensor_dump.config import QUANT_TYPES, DumpConfig, read_control
from instruments.tensor_dump.config import contradictions as of_dump
from models.config import GLOBAL_POOL, MoEShape, setting_word
from models.targets.base import MoETarget
from pipeline.settings import ALL, LOOKING, STAGES, TRAINED, Settings, Uses, with_ancestors
from stages.artifacts.job import find_workers
from stages.calibration.config import POOL_ROUTERS, ROUTERS
from stages.cluster.config import NOTHING_RANKED
from stages.diagnose.config import CHECKS, DiagnoseConfig
from stages.dump.config import DumpStageConfig
from stages.evaluate.config import POOL_BASELINES, EvaluateConfig
from stages.score.config import ScoreConfig
from stages.text.config import DataConfig
from stages.train.config import TrainConfig

logger = logging.getLogger(__name__)

# Group → setting → the reason why it is not read, from `unread` of the group's config class.
Unread = Mapping[str, Mapping[str, str]]


def find_uses(settings: Settings, shape: MoEShape | None = None, width: int = 0) -> Uses:
    """Which results of other stages the stages read; without a shape, all that they may read."""
    evaluated = settings.evaluate.checkpoint
    if shape is None:
        return Uses(evaluated)
    cluster = settings.cluster
    return Uses(evaluated, score=cluster.reads_score(shape, width), passes=cluster.needs_pass(shape, width))


def involves(settings: Settings, stage: str) -> bool:
    """Whether this run uses `stage` or its result; False if the setting `stage` is unknown."""
    known = settings.stage in {ALL, *STAGES}
    return known and any(other.name == stage for other in with_ancestors(settings.stage, find_uses(settings)))


def find_unread(settings: Settings, shape: MoEShape | None, width: int, target: MoETarget | None = None) -> Unread:
    """Settings that are not read; without a shape (none is carved, or it is unknown) only of groups that need none."""
    found = {
        "scan": settings.scan.unread(),
        "data": settings.data.unread(),
        "store": settings.store.unread(),
        "score": settings.score.unread(),
        "train": settings.train.unread(biased=None if target is None else target.selection_bias is not None),
    }
    # Without the stage, `warn_of_other_stages` warns of all that is typed.
    dumps = involves(settings, "dump")
    found["dump"] = settings.dump.unread(offloaded=settings.model.device_map != "none") if dumps else {}
    if shape is None:
        return found
    return found | {
        "vocabulary": settings.vocabulary.unread(pooled=shape.pooled),
        "cluster": settings.cluster.unread(shape, width),
        "assemble": settings.assemble.unread(shape),
        "project": settings.project.unread(shape, settings.assemble.router),
    }


def warn_of_unread(
    settings: Settings, shape: MoEShape | None = None, width: int = 0, target: MoETarget | None = None
) -> None:
    """Log a warning for each setting without effect."""
    found = dict(find_unread(settings, shape, width, target))
    if involves(settings, "cluster") and shape is not None and not settings.cluster.reads_score(shape, width):
        ranked = settings.cluster.ranks(shape, width)
        reason = f"cluster.always_on_by={settings.cluster.always_on_by}" if ranked else NOTHING_RANKED
        found["score"] = dict.fromkeys(vars(settings.score), reason)
    if named := settings.data.named_heldout:
        found["data"] = {**found["data"], "heldout_share": f"data.{named}={getattr(settings.data, named)}"}
    if settings.stage == "diagnose":
        found["model"] = dict.fromkeys(("dtype", "quantization"), "each check chooses the number formats")
    _warn_of_sampling(settings)
    if shape is not None:
        refits = settings.project.refits(shape, settings.assemble.router)  # no part of assemble's fingerprint
        found["assemble"] = settings.assemble.unread(shape, refits=refits)
        _warn_of_active(settings)
        _warn_of_constant_gates(settings, shape, target)
    pooled, baselines = shape is not None and shape.pooled, settings.evaluate.baselines
    left_out = [name for name in baselines if name not in POOL_BASELINES]
    if pooled and left_out and baselines != EvaluateConfig().baselines and involves(settings, "evaluate"):
        logger.warning("evaluate.baselines=[%s] is ignored: topology=global_pool", ",".join(left_out))
    if pooled and not settings.vocabulary.tokens:
        del found["vocabulary"]  # vocabulary=none agrees with a pool, which uses no random tokens
    nodes = {group: getattr(settings, group) for group in found} | settings.data.mixed
    found |= {group: source.unread(settings.data.heldout_path) for group, source in settings.data.mixed.items()}
    for group, reasons in found.items():
        for name, value in vars(nodes[group]).items():
            if name in reasons and value != getattr(type(nodes[group])(), name):
                logger.warning("%s.%s=%s is ignored: %s", group, name, value, reasons[name])


def warn_of_other_stages(settings: Settings, words: Sequence[str]) -> None:
    """Log a warning for words that concern train, dump, diagnose or a check of diagnose if the run does without."""
    for stage in (TRAINED, *LOOKING):
        groups = {stage, "check"} if stage == "diagnose" else {stage}
        typed = [word for word in words if word.partition("=")[0].partition(".")[0] in groups]
        if typed and not involves(settings, stage):
            logger.warning("%s is ignored: stage=%s does not run %s", " ".join(typed), settings.stage, stage)
    others = tuple(f"diagnose.{check}." for check in CHECKS if check != settings.check)
    typed = [word for word in words if word.startswith(others)]
    if settings.stage != "diagnose":
        return
    if typed:
        logger.warning("%s is ignored: check=%s", " ".join(typed), settings.check)
    for name, reason in settings.diagnose.unread(settings.check).items():
        for word in (word for word in words if word.partition("=")[0] == f"diagnose.{name}"):
            logger.warning("%s is ignored: %s", word, reason)


def _warn_of_sampling(settings: Settings) -> None:
    """Warn if data.tokens is set, but all stages of the run read only the first data.sample_tokens."""
    tokens, sample = settings.data.tokens, settings.data.sample_tokens
    reading = [stage for stage in with_ancestors(settings.stage, find_uses(settings)) if "data" in stage.nodes]
    if tokens != DataConfig().tokens and sample and sample < tokens and all(stage.samples for stage in reading):
        logger.warning(
            "stage=%s reads the first data.sample_tokens=%d of data.tokens=%d; data.sample_tokens=null reads all",
            settings.stage, sample, tokens,
        )  # fmt: skip


def _warn_of_constant_gates(settings: Settings, shape: MoEShape, target: MoETarget | None) -> None:
    """Warn if the loss has no gradient for the routers, and only auxiliary losses would move them."""
    if target is None or not involves(settings, "train") or settings.train.straight_through:
        return
    if shape.top_k == 1 < shape.experts and target.normalised(shape):
        logger.warning(
            "top_k=1: %s gives the chosen expert a gate of 1, so the loss has no gradient for the routers, and "
            "only train.balance and train.z_weight move them; train.straight_through=true gives it one",
            target.model_type,
        )


def _warn_of_active(settings: Settings) -> None:
    """Warn if `active` is set, but no dial is left for it to fill, see `resolve_shape`."""
    filled = ["top_k"] if settings.topology == GLOBAL_POOL else ["experts", "n", "top_k", "always_on"]
    if settings.active != Settings.active and all(getattr(settings, name) is not None for name in filled):
        logger.warning("active=%g is ignored: it fills what is null of %s", settings.active, ", ".join(filled))


def contradictions(settings: Settings) -> Iterator[ConfigError]:
    """Errors that do not depend on the source model."""
    workers = find_workers().world
    if involves(settings, "score"):
        yield from _score_contradictions(settings.score, gradients=settings.scan.gradients)
    if involves(settings, "dump"):
        yield from _dump_contradictions(settings.dump)
    if involves(settings, "diagnose"):
        yield from _missing_files(settings.diagnose)
    router, pooled = settings.assemble.router, settings.topology == GLOBAL_POOL and involves(settings, "assemble")
    if pooled and router in {*ROUTERS} - POOL_ROUTERS:
        what = f"assemble.router={router} does not support a pool of experts"
        where = "settings assemble.router and topology=global_pool"
        yield ConfigError(what, where=where, do="assemble.router=error, or random")
    if involves(settings, "train"):
        yield from _training_contradictions(settings.train, workers)
        if settings.assemble.mode == "parity" and settings.assemble.parity_logit_std == 0:
            what = "assemble.parity_logit_std=0 makes all routers 0, and training could not scale their logits up"
            do = "assemble.parity_logit_std=0.001, or assemble.mode=train"
            yield ConfigError(what, where="settings assemble.mode and assemble.parity_logit_std", do=do)
        if settings.train.straight_through and settings.topology == GLOBAL_POOL:
            what = "train.straight_through=true computes all experts for every token, in a pool those of all layers"
            where = "settings train.straight_through and topology=global_pool"
            yield ConfigError(what, where=where, do="train.straight_through=false")
    if workers > 1 and settings.model.device_map != "none":
        yield ConfigError(
            f"model.device_map={settings.model.device_map} spreads one model over all devices; torchrun started "
            f"{workers} workers, and each loads its own",
            where="setting model.device_map",
            do="model.device_map=none, or python -m pipeline without torchrun",
        )


def balance_errors(settings: Settings, target: MoETarget) -> Iterator[ConfigError]:
    """Errors: a load balancing that the architecture does not have."""
    if involves(settings, "train") and settings.train.balance == "selection_bias" and target.selection_bias is None:
        what = f"train.balance=selection_bias moves a bias of the router, and {target.model_type} has none"
        yield ConfigError(what, where="setting train.balance", do="train.balance=auto")


def _score_contradictions(score: ScoreConfig, *, gradients: bool) -> Iterator[ConfigError]:
    """Errors: the weights of all terms of the score are 0, or it needs gradients that the scan does not compute."""
    if score.method == "s_p" and not any((score.activation_weight, score.gradient_weight, score.frequency_weight)):
        what = "score.method=s_p ranks by nothing: the weights of all three terms are 0"
        where = "settings score.activation_weight, score.gradient_weight and score.frequency_weight"
        yield ConfigError(what, where=where, do="score.activation_weight=1")
    elif score.method == "s_p" and score.form == "inverse_gradient" and score.needs_gradients:
        what = "score.form=inverse_gradient ranks by nothing: it divides activation and frequency, whose weights are 0"
        where = "settings score.form, score.activation_weight and score.frequency_weight"
        yield ConfigError(what, where=where, do="score.form=weighted, or score.activation_weight=1")
    elif score.needs_gradients and not gradients:
        alone = "score.gradient_weight alone" if score.method == "s_p" else f"score.method={score.method}"
        what = f"{alone} needs gradients, and scan.gradients=false computes none"
        where = "settings score.method and scan.gradients"
        yield ConfigError(what, where=where, do="scan.gradients=true, or score.method=contribution")


def _dump_contradictions(dump: DumpStageConfig) -> Iterator[ConfigError]:
    """Errors: settings of the dump exclude each other, or leave nothing to dump."""
    try:  # the setting takes precedence over CUSTOM_QUANT_TYPE; `field_errors` checks its value
        read_control(Path(), DumpConfig(quant_type=dump.quant_type and QUANT_TYPES[0]), os.environ)
    except ConfigError as error:
        yield error
    yield from of_dump(dump, "dump.")
    if not dump.enabled:
        what = "the dump is switched off, and stage=dump does nothing else"
        where, do = "setting dump.enabled, environment variable TENSOR_SAVE_ENABLED", "dump.enabled=true"
        yield ConfigError(what, where=where, do=do)
    if dump.folder is not None and Path(dump.folder).exists() and not Path(dump.folder).is_symlink():
        what = f"dump.folder={dump.folder} exists already and is not a link, so this run cannot replace it"
        where = "setting dump.folder, environment variable TENSOR_SAVE_DIR"
        yield ConfigError(what, where=where, do=setting_word("dump.folder", f"{dump.folder}-2"))
    if dump.first_step >= dump.steps:
        what = f"dump.first_step={dump.first_step} is never reached: steps count from 0, and dump.steps={dump.steps}"
        do = f"dump.steps={dump.first_step + 1}"
        yield ConfigError(what, where="settings dump.first_step and dump.steps", do=do)
    if dump.ranks is not None and 0 not in dump.ranks:
        what = f"dump.ranks={dump.ranks} dumps nothing: the stage is run by process 0 alone"
        yield ConfigError(what, where="setting dump.ranks", do="dump.ranks=null")
    if not dump.gradients and all(tensor.startswith("grad_") for tensor in dump.tensors):
        what = "dump.gradients=false computes no gradients, and dump.tensors has nothing else"
        do = "dump.gradients=true, or dump.tensors=[input,weight]"
        yield ConfigError(what, where="settings dump.gradients and dump.tensors", do=do)


def _missing_files(diagnose: DiagnoseConfig) -> Iterator[ConfigError]:
    """Errors: files to diagnose do not exist."""
    checkpoint, file = diagnose.checkpoint, diagnose.analyze_tensor.file
    if checkpoint is not None and not (Path(checkpoint) / "config.json").is_file():
        what, where = f"{checkpoint} holds no config.json, so no checkpoint", "setting diagnose.checkpoint"
        do = "diagnose.checkpoint=null for the dense model, or a folder that a run left as outputs/latest/checkpoint"
        yield ConfigError(what, where=where, do=do)
    if file is not None and not Path(file).is_file():
        what, where = f"there is no file {file}", "setting diagnose.analyze_tensor.file"
        yield ConfigError(what, where=where, do="diagnose.analyze_tensor.file=null for activations of the model")


def _training_contradictions(train: TrainConfig, workers: int) -> Iterator[ConfigError]:
    """Errors: shares that do not add up to 1, no loss, shards of one process, or an indivisible batch."""
    shares = train.router_share + train.experts_share + train.all_share
    if abs(shares - 1) > 1e-6:
        what = f"the phases' shares add up to {shares:g}, not 1"
        where = "settings train.router_share, train.experts_share and train.all_share"
        do = f"train.experts_share={max(0.0, 1 - train.router_share - train.all_share):g}"
        yield ConfigError(what, where=where, do=do)
    if not (train.language_model or train.logits):
        what = "nothing is minimised: the weights of both losses are 0"
        where = "settings train.language_model and train.logits"
        yield ConfigError(what, where=where, do="train.language_model=1")
    if train.fsdp and workers == 1:
        what = "train.fsdp=true shards the model over processes, but there is only one"
        do = "train.fsdp=false, or torchrun --nproc-per-node=2 -m pipeline"
        yield ConfigError(what, where="setting train.fsdp", do=do)
    yield from _batch_contradictions(train, workers)


def _batch_contradictions(train: TrainConfig, workers: int) -> Iterator[ConfigError]:
    """Errors: the batch cannot be divided among the processes."""
    at_once, where = train.micro_batch * workers, "settings train.batch and train.micro_batch"
    if at_once > train.batch > 0:
        most = max(1, train.batch // workers)
        what = f"train.micro_batch={train.micro_batch} x {workers} processes is more than train.batch={train.batch}"
        yield ConfigError(what, where=where, do=f"train.micro_batch={most} train.batch={most * workers}")
    elif at_once > 0 and train.batch % at_once:
        processes = f" x {workers} processes" if workers > 1 else ""
        what = f"train.batch={train.batch} is no multiple of train.micro_batch={train.micro_batch}{processes}"
        yield ConfigError(what, where=where, do=f"train.batch={at_once * max(1, round(train.batch / at_once))}")
