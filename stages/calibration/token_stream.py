"""The hidden states of one model variant on its way through the layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from instruments.errors import NumericsError
from models.stream import LayerStream, StreamLayer
from stages.calibration.batches import pick_tokens, take_tokens
from stages.losses import MeanLoss, supervised_tokens, token_losses
from stages.text.sequences import TokenBatch


class TokenStream:
    """Enter a layer to see its FFN inputs, fit what is to be fitted on them, leave with what the FFN gives for them.

    Between `enter` and `leave`, `inputs` holds the FFN inputs of every batch, real tokens only, (T, D) each. Memory:
    two hidden states per token.

    Batches that pass some layers only come last, so that those before keep their places when these are gone.
    """

    inputs: list[Tensor]

    def __init__(self, stream: LayerStream, batches: Sequence[TokenBatch]) -> None:
        """Embed the tokens."""
        self.masks: list[Tensor] = [batch.attention_mask.bool().to(stream.device) for batch in batches]
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
            del self._layers[-1], self.masks[-1], self.hidden[-1]
        self.entered += 1
        for index, mask_BT in enumerate(self.masks):
            self.hidden[index], x_BTD = layer.attend(self.hidden[index])
            self.inputs.append(x_BTD[mask_BT])
        if not all(bool(x_TD.isfinite().all()) for x_TD in self.inputs):
            raise NumericsError(
                "hidden states are not finite",
                where=f"FFN input of layer {self.entered - 1}",
                do="check the weights of the layers before it; in another precision, if that is narrow",
            )

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Add the FFN's outputs, (T, D) for every batch of `inputs`, to the residual stream as the layer adds them."""
        assert self._layer is not None, "enter a layer first"
        for hidden_BTD, mask_BT, output_TD in zip(self.hidden, self.masks, outputs, strict=True):
            hidden_BTD[mask_BT] = self._layer.add(hidden_BTD[mask_BT], output_TD)
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

    def target(self, batch: int, _x_TD: Tensor) -> Tensor:
        """The wanted output of a batch."""
        return self.outputs[batch]


@torch.no_grad()
def sample_layers(stream: LayerStream, batches: Sequence[TokenBatch], tokens: int) -> list[LayerSample]:
    """One pass of the dense model: the same tokens in every layer, about so many, spread evenly over each batch.

    Memory: 2·L·D numbers a token.
    """
    passing, samples = TokenStream(stream, batches), []
    for layer in tqdm(stream.layers(), total=stream.depth, desc="sample", unit="layer"):
        passing.enter(layer)
        given = [layer.ffn(x_TD) for x_TD in passing.inputs]
        picks = pick_tokens([len(x_TD) for x_TD in passing.inputs], tokens)
        inputs, outputs = take_tokens(passing.inputs, picks), take_tokens(given, picks)
        samples.append(LayerSample(inputs, outputs, layer.ffn.act))
        passing.leave(given)
    return samples
