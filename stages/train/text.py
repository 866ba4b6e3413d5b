"""The text of a training: that of the carve's calibration, or the dense model's own answers to it."""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from instruments.device import is_launch_bound
from models.config import ModelConfig
from models.loading import input_device, load_dense, padding_id
from stages.artifacts.job import Job
from stages.text.batches import TokenBatch, batch_sequences
from stages.text.config import DataConfig
from stages.text.generated import continue_prompts, load_generated, load_prompts, save_generated
from stages.text.sequences import LoadedText, load_text
from stages.train.config import TrainConfig

# Tokens that are written at a time.
AT_ONCE, AT_ONCE_ON_GPU = 4096, 32768


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    train: LoadedText
    heldout: list[TokenBatch]
    pad_id: int


def read_text(
    job: Job,
    model: ModelConfig,
    folder: Path,
    data: DataConfig,
    train: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> TrainingText:
    """Read up to `train.tokens` of the calibration split, and the first sequences of the held-out split.

    With `train.own_answers` the dense model, `model` in `folder`, writes the answers of the calibration split.
    """
    wanted, pad_id = replace(data, tokens=train.tokens), padding_id(tokenizer)
    if train.own_answers:
        text = _write_answers(job, model, folder, replace(wanted, max_new_tokens=train.own_answers), tokenizer, seed)
    else:
        text = load_text(wanted, tokenizer, "calibration")
    heldout = load_text(data, tokenizer, "heldout").sequences[: train.heldout_sequences]
    return TrainingText(text, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)


def _write_answers(
    job: Job, model: ModelConfig, folder: Path, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> LoadedText:
    """The dense model's answers to the prompts of the text; a killed run has kept them in `scratch`."""
    text: LoadedText | None = job.workers.lead(lambda: load_generated(job.scratch))
    if text is not None:
        return text
    prompts, dense = load_prompts(data, tokenizer), load_dense(model, folder)
    at_once = AT_ONCE_ON_GPU if is_launch_bound(input_device(dense)) else AT_ONCE
    text = continue_prompts(
        dense, tokenizer, prompts, data, seed=seed, batch_tokens=max(at_once, data.max_length), workers=job.workers
    )
    if job.workers.leads:
        save_generated(text, job.scratch)
    return text
