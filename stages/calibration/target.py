"""What a carved layer is aligned to."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from models.errors import ConfigError
from models.ffn import DenseFFN
from models.stream import LayerStream, StreamLayer
from stages.calibration.token_stream import TokenStream
from stages.data.batches import TokenBatch


class AlignmentTarget:
    """local: the dense FFN on the carved model's own inputs. residual: the dense model's residual stream.

    The second also asks a layer to make good what earlier layers got wrong, and costs a dense model beside the carved.
    """

    def __init__(self, kind: str, stream: LayerStream, batches: Sequence[TokenBatch]) -> None:
        """Start a dense stream where one is needed."""
        self._dense = TokenStream(stream, batches) if kind == "residual" else None
        self._wanted: dict[int, Tensor] = {}  # of this layer: computed once, asked for many times
        self._ffn: DenseFFN | None = None
        self._carved: TokenStream | None = None

    def enter(self, layer: StreamLayer, carved: TokenStream) -> None:
        """Go on to a layer that the carved stream has entered and not yet left."""
        if self._dense is not None and not layer.plain_residual:
            raise ConfigError(
                "this family norms or scales an FFN's output before it adds it: no output can be read off the residual "
                "stream",
                where="project.alignment_target=residual",
                do="project.alignment_target=local",
            )
        self._ffn, self._carved, self._wanted = layer.ffn, carved, {}
        if self._dense is not None:
            self._dense.enter(layer)
            self._dense.leave(map(layer.ffn, self._dense.inputs))

    def __call__(self, index: int, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Wanted output of batch `index`, whose inputs are `x_TD`."""
        if index not in self._wanted:
            self._wanted[index] = self._compute(index, x_TD)
        return self._wanted[index]

    def _compute(self, index: int, x_TD: Tensor) -> Tensor:
        assert self._ffn is not None, "enter a layer first"
        assert self._carved is not None, "enter a layer first"
        if self._dense is None:
            return self._ffn(x_TD)
        mask_BT = self._carved.masks[index]
        return self._dense.hidden[index][mask_BT] - self._carved.hidden[index][mask_BT]
