"""What a layer's FFN sees and does on the calibration text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from models.config import ModelConfig
from models.ffn import DenseFFN
from models.loading import load_tokenizer, resolve_device
from models.source import resolve_folder
from models.stream import LayerStream
from stages.calibration.batches import calibration_batches, evenly_spaced
from stages.calibration.config import VocabularyConfig
from stages.calibration.token_stream import TokenStream
from stages.text.batches import TokenBatch
from stages.text.config import DataConfig


@dataclass(frozen=True)
class LayerActivity:
    """One layer's FFN and its inputs, (T, D) for every batch, real tokens only; valid until the next layer comes."""

    ffn: DenseFFN
    inputs: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        """T of all batches."""
        return sum(map(len, self.inputs))

    def sample(self, tokens: int) -> Float[Tensor, "T D"]:
        """At most `tokens` of the inputs, evenly spaced over the text."""
        x_TD = torch.cat(list(self.inputs))
        return x_TD[evenly_spaced(len(x_TD), tokens)]


@contextmanager
def open_activities(
    model: ModelConfig, data: DataConfig, vocabulary: VocabularyConfig, batch_tokens: int
) -> Iterator[Iterator[LayerActivity]]:
    """One pass of the dense model over the calibration text: the activity of every layer in order.

    Memory: the hidden states of all tokens and one layer.
    """
    folder = resolve_folder(model)
    batches = calibration_batches(data, vocabulary, load_tokenizer(folder), batch_tokens)
    with LayerStream(folder, device=resolve_device(model)) as stream:
        yield stream_activities(stream, batches)


def stream_activities(stream: LayerStream, batches: Sequence[TokenBatch]) -> Iterator[LayerActivity]:
    """The activity of every layer in order; asking for the next one passes this one's FFN."""
    tokens = TokenStream(stream, batches)
    for layer in stream.layers():
        tokens.enter(layer)
        yield LayerActivity(layer.ffn, tokens.inputs)
        tokens.leave(map(layer.ffn, tokens.inputs))
