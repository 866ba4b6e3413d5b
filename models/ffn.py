"""The FFN view: a dense gated FFN as its units."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.quantization import dense_weight


class GatedFFN(Protocol):
    """What transformers calls an MLP in the supported families."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: Callable[[Tensor], Tensor]


def ffn_modules(dense: PreTrainedModel) -> list[GatedFFN]:
    """The gated FFNs of a dense model in layer order."""
    return [layer.mlp for layer in dense.get_decoder().layers]


def ffn_weight_names(dense: PreTrainedModel) -> list[dict[str, str]]:
    """For every layer: gate, up and down → name of the weight in the checkpoint."""
    names = {id(module): name for name, module in dense.named_modules()}
    projections = ("gate", "up", "down")
    return [
        {part: f"{names[id(getattr(mlp, f'{part}_proj'))]}.weight" for part in projections}
        for mlp in ffn_modules(dense)
    ]


@dataclass(frozen=True)
class DenseFFN:
    """FFN(x) = Σ_j h_j(x)·d_j with h_j(x) = act(g_j·x)·(u_j·x); unit j is row j of gate and up, column j of down."""

    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor
    act: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, module: GatedFFN, like: Tensor | None = None) -> "DenseFFN":
        """The weights of a module as plain numbers, however it keeps them.

        Args:
            module: quantised and offloaded layers are welcome.
            like: a tensor on the device and in the number format the weights are to have; None leaves them as
                `dense_weight` gives them. What is plain and there already is not copied.
        """
        gate_FD, up_FD, down_DF = map(dense_weight, (module.gate_proj, module.up_proj, module.down_proj))
        if like is not None:
            gate_FD, up_FD, down_DF = gate_FD.to(like), up_FD.to(like), down_DF.to(like)
        return cls(gate_FD, up_FD, down_DF, module.act_fn)

    @property
    def width(self) -> int:
        """F."""
        return len(self.gate_FD)

    def hidden(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """Unit activations h."""
        hidden: Tensor = self.act(x_TD @ self.gate_FD.T) * (x_TD @ self.up_FD.T)
        return hidden

    def output(self, h_TF: Float[Tensor, "T F"]) -> Float[Tensor, "T D"]:
        """Σ_j h_j·d_j."""
        return h_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """FFN(x)."""
        return self.output(self.hidden(x_TD))
