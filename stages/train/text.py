"""The text that training reads, and the held-out text it is judged on."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from stages.data.batches import TokenBatch, batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import TokenSequence, load_sequences
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class TrainingText:
    """Sequences to learn from, and batches that are only looked at."""

    sequences: list[TokenSequence]
    heldout: list[TokenBatch]
    pad_id: int

    @property
    def tokens(self) -> int:
        """There are to learn from."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence."""
        return self.tokens / len(self.sequences)


def read_text(data: DataConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingText:
    """As much of the calibration split as training wants, and the first sequences of the held-out one."""
    sequences = load_sequences(replace(data, tokens=train.tokens), tokenizer, "calibration")
    heldout = load_sequences(data, tokenizer, "heldout")[: train.heldout_sequences]
    pad_id = tokenizer.pad_token_id or 0
    return TrainingText(sequences, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)
