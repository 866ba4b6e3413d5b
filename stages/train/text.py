"""The text of a training."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from models.loading import padding_id
from stages.text.batches import TokenBatch, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import LoadedText, load_text
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    train: LoadedText
    heldout: list[TokenBatch]
    pad_id: int


def read_text(data: DataConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingText:
    """Read up to `train.tokens` of the text to train on, and the first sequences of the held-out split."""
    pad_id = padding_id(tokenizer)
    text = load_text(replace(train.own_text(data) or data, tokens=train.tokens), tokenizer, "calibration")
    heldout = load_text(data, tokenizer, "heldout").sequences[: train.heldout_sequences]
    return TrainingText(text, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)
