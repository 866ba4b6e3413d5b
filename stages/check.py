"""Contradictions between the settings of one stage, found before any weights are loaded."""

import os
from collections.abc import Iterator
from pathlib import Path

from instruments.errors import ConfigError
from instruments.tensor_dump.config import QUANT_TYPES, DumpConfig, read_control
from models.config import setting_word
from stages.diagnose.config import DiagnoseConfig
from stages.dump.config import DumpStageConfig
from stages.score.config import ScoreConfig
from stages.train.config import TrainConfig


def check_score(score: ScoreConfig, *, gradients: bool) -> Iterator[ConfigError]:
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


def check_dump(dump: DumpStageConfig) -> Iterator[ConfigError]:
    """Errors: settings of the dump exclude each other, or leave nothing to dump."""
    try:  # the setting takes precedence over CUSTOM_QUANT_TYPE; `field_errors` checks its value
        read_control(Path(), DumpConfig(quant_type=dump.quant_type and QUANT_TYPES[0]), os.environ)
    except ConfigError as error:
        yield error
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


def check_diagnose(diagnose: DiagnoseConfig) -> Iterator[ConfigError]:
    """Errors: files to diagnose do not exist."""
    checkpoint, file = diagnose.checkpoint, diagnose.analyze_tensor.file
    if checkpoint is not None and not (Path(checkpoint) / "config.json").is_file():
        what, where = f"{checkpoint} holds no config.json, so no checkpoint", "setting diagnose.checkpoint"
        do = "diagnose.checkpoint=null for the dense model, or a folder that a run left as outputs/latest/checkpoint"
        yield ConfigError(what, where=where, do=do)
    if file is not None and not Path(file).is_file():
        what, where = f"there is no file {file}", "setting diagnose.analyze_tensor.file"
        yield ConfigError(what, where=where, do="diagnose.analyze_tensor.file=null for activations of the model")


def check_train(train: TrainConfig, workers: int) -> Iterator[ConfigError]:
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
    yield from _check_batch(train, workers)


def _check_batch(train: TrainConfig, workers: int) -> Iterator[ConfigError]:
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
