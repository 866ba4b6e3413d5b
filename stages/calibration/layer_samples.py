"""What every layer's FFN of the dense model sees and gives, on some calibration tokens, all layers side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from models.stream import LayerStream
from stages.calibration.spread import pick_tokens, take_tokens
from stages.calibration.token_stream import TokenStream
from stages.data.batches import TokenBatch


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
