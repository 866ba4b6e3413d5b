"""What a stage is fitted on: source, calibration text and random tokens in batches, and their way through layers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from instruments.errors import NumericsError
from models.config import ModelConfig
from models.loading import load_tokenizer, resolve_device
from models.source import read_config, resolve_folder
from models.stream import LayerStream, StreamLayer
from stages.calibration.config import VocabularyConfig
from stages.losses import MeanLoss, supervised_tokens, token_losses
from stages.text.config import DataConfig
from stages.text.sequences import IGNORED, TokenBatch, TokenSequence, batch_sequences, load_sequences

OFFSET = 1000  # of Zipf and Mandelbrot's law: the rare count for something, too
SEED = 0


def draw_sequences(
    tokenizer: PreTrainedTokenizerBase, met: Collection[int], tokens: int, length: int
) -> list[TokenSequence]:
    """At most so many tokens in sequences of at most `length`, none twice; no label counts in a loss.

    Special tokens, added tokens and those that the text has `met` are not drawn. A token's weight falls with its id,
    1 / (rank + OFFSET): pair merges are numbered in the order they were learnt, the frequent first. The draw is always
    the same for the same `met`.
    """
    known = {*met, *tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ids_V = torch.tensor(sorted(set(tokenizer.get_vocab().values())))
    weights_V = 1.0 / (torch.arange(len(ids_V), dtype=torch.float64) + OFFSET)
    weights_V[torch.isin(ids_V, torch.tensor(sorted(known)))] = 0.0
    count = min(tokens, int(weights_V.count_nonzero()))
    if not count:
        return []
    drawn_T = ids_V[weights_V.multinomial(count, generator=torch.Generator().manual_seed(SEED))]
    return [
        TokenSequence(f"vocabulary {number}", ids_T.tolist(), [IGNORED] * len(ids_T))
        for number, ids_T in enumerate(torch.split(drawn_T, length))
    ]


# The validation split is counted in batches: with fewer than these it would be too coarse.
LEAST_BATCHES = 16


def calibration_batches(
    data: DataConfig, vocabulary: VocabularyConfig, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> list[TokenBatch]:
    """The calibration split, then words that it has not, if any are to be drawn, and never more of them than of it.

    Batches hold at most `batch_tokens`, fewer where that would give less than 16 of the text.
    """
    sequences = load_sequences(data, tokenizer, "calibration")
    total = sum(len(sequence.ids) for sequence in sequences)
    size = min(batch_tokens, max(1, total // LEAST_BATCHES))
    pad_id = tokenizer.pad_token_id or 0
    batches = batch_sequences(sequences, size, pad_id)
    if not vocabulary.tokens:
        return batches
    met = {id_ for sequence in sequences for id_ in sequence.ids}
    drawn = draw_sequences(tokenizer, met, min(vocabulary.tokens, total), data.max_length)
    marked = (replace(batch, layers=vocabulary.layers, is_text=False) for batch in batch_sequences(drawn, size, pad_id))
    return [*batches, *marked]


@dataclass(frozen=True)
class CalibrationContext:
    """What a stage that fits something works with; made once in each."""

    model: ModelConfig
    folder: Path  # of the dense checkpoint
    config: Mapping[str, Any]  # its config.json
    batches: list[TokenBatch]  # text, then random tokens
    device: torch.device
    seed: int

    @classmethod
    def of(
        cls, model: ModelConfig, data: DataConfig, vocabulary: VocabularyConfig, batch_tokens: int, seed: int
    ) -> "CalibrationContext":
        """Find the source and tokenise the calibration split. Raises UserError."""
        folder = resolve_folder(model)
        batches = calibration_batches(data, vocabulary, load_tokenizer(folder), batch_tokens)
        return cls(model, folder, read_config(folder), batches, resolve_device(model), seed)

    @property
    def text(self) -> list[TokenBatch]:
        """The batches without random tokens; they come first."""
        return [batch for batch in self.batches if batch.is_text]

    def layer_seed(self, index: int) -> int:
        """A layer's own seed, see `layer_seed`."""
        return layer_seed(self.seed, index)


def evenly_spaced(count: int, wanted: int) -> Int[Tensor, "t"]:
    """Indices of `wanted` of `count`, first and last among them; at least one, all where more are wanted."""
    return torch.linspace(0, count - 1, max(1, min(count, wanted))).round().long()


def take_tokens(inputs: Sequence[Tensor], outputs: Sequence[Tensor], wanted: int) -> tuple[list[Tensor], list[Tensor]]:
    """About `wanted` tokens of both: the same evenly spaced part of every batch, at least one token of each."""
    share = min(1.0, wanted / max(1, sum(map(len, inputs))))
    picks = [evenly_spaced(len(x_TD), round(len(x_TD) * share)) for x_TD in inputs]
    taken = ([batch_TD[pick_t] for batch_TD, pick_t in zip(part, picks, strict=True)] for part in (inputs, outputs))
    return next(taken), next(taken)


def layer_seed(seed: int, index: int) -> int:
    """The seed of a layer below 10,007, apart from those of another run's `seed`.

    A stage that must not repeat the draws of another adds an offset to `index`.
    """
    return seed * 10_007 + index


class TokenStream:
    """Enter a layer to see its FFN inputs, fit what is to be fitted on them, leave with what the FFN gives for them.

    Between `enter` and `leave`, `inputs` holds the FFN inputs of every batch, real tokens only, (T, D) each. Memory:
    two hidden states per token.

    Batches that pass some layers only come last, so that those before keep their places when these are gone.
    """

    inputs: list[Tensor]

    def __init__(self, stream: LayerStream, batches: Sequence[TokenBatch]) -> None:
        """Embed the tokens."""
        # Places of the real tokens, not masks: a GPU would be waited for to count them, at each use.
        self._real = [batch.attention_mask.flatten().nonzero()[:, 0].to(stream.device) for batch in batches]
        self.hidden = stream.embed([batch.input_ids for batch in batches])
        self._layers = [batch.layers for batch in batches]  # that each passes; None: all
        self.inputs = []
        self.entered = 0  # layers so far
        self._layer: StreamLayer | None = None

    def enter(self, layer: StreamLayer) -> None:
        """Pass the layer's attention.

        Raises:
            NumericsError: an FFN input is not finite.
        """
        self.inputs, self._layer = [], layer
        while self._layers and self._layers[-1] is not None and self._layers[-1] <= self.entered:
            del self._layers[-1], self._real[-1], self.hidden[-1]
        self.entered += 1
        for index, real_t in enumerate(self._real):
            self.hidden[index], x_BTD = layer.attend(self.hidden[index])
            self.inputs.append(x_BTD.flatten(0, 1)[real_t])
        if self.inputs and not bool(torch.stack([x_TD.isfinite().all() for x_TD in self.inputs]).all()):
            raise NumericsError(
                "hidden states are not finite",
                where=f"FFN input of layer {self.entered - 1}",
                do="check the weights of the layers before it; in another precision, if that is narrow",
            )

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Add the FFN's outputs, (T, D) for every batch of `inputs`, to the residual stream as the layer adds them."""
        assert self._layer is not None, "enter a layer first"
        for index, (real_t, output_TD) in enumerate(zip(self._real, outputs, strict=True)):
            rows_TD = self.hidden[index].flatten(0, 1)
            rows_TD[real_t] = self._layer.add(rows_TD[real_t], output_TD)
            self.hidden[index] = rows_TD.view(self.hidden[index].shape)
        self.inputs, self._layer = [], None

    @torch.no_grad()
    def loss(self, stream: LayerStream, batches: Sequence[TokenBatch]) -> MeanLoss:
        """Next-token loss after the last layer, a sequence at a time: logits are wide."""
        logits = stream.head()
        total, count = 0.0, 0
        for hidden_BTD, batch in zip(self.hidden, batches, strict=True):
            for hidden_TD, labels_T in zip(hidden_BTD, batch.labels.to(stream.device), strict=True):
                total += float(token_losses(logits(hidden_TD[None]), labels_T[None]).double().sum())
                count += int(supervised_tokens(labels_T[None]))
        return MeanLoss(total, count)


@dataclass(frozen=True)
class LayerSample:
    """Inputs and outputs of one layer's FFN, (t, D) for every batch, and its activation function."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    act: Callable[[Tensor], Tensor]


@torch.no_grad()
def sample_layers(stream: LayerStream, batches: Sequence[TokenBatch], tokens: int) -> list[LayerSample]:
    """One pass of the dense model: the same tokens in every layer, about so many, spread evenly over each batch.

    Memory: 2·L·D numbers a token.
    """
    passing, samples = TokenStream(stream, batches), []
    for layer in tqdm(stream.layers(), total=stream.depth, desc="sample", unit="layer"):
        passing.enter(layer)
        given = [layer.ffn(x_TD) for x_TD in passing.inputs]
        samples.append(LayerSample(*take_tokens(passing.inputs, given, tokens), layer.ffn.act))
        passing.leave(given)
    return samples
