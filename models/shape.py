"""The shape of a carve."""

from dataclasses import dataclass

PER_LAYER, GLOBAL_POOL = "per_layer", "global_pool"
TOPOLOGIES = (PER_LAYER, GLOBAL_POOL)


@dataclass(frozen=True)
class MoEShape:
    """E experts of N neurons, K of them active per token, beside S always-on neurons, per layer.

    In a global pool the E experts are all there are: every layer sends a token to K of the same E.
    """

    experts: int
    n: int
    top_k: int
    always_on: int
    topology: str = PER_LAYER

    @property
    def active_width(self) -> int:
        """Neurons a token passes through in a layer: S + K·N."""
        return self.always_on + self.top_k * self.n

    @property
    def pooled(self) -> bool:
        """Whether all layers share the experts."""
        return self.topology == GLOBAL_POOL

    def neurons(self, layers: int) -> int:
        """Neurons of the whole model, always-on ones included."""
        return self.experts * self.n * (1 if self.pooled else layers) + self.always_on * layers
