"""Settings of the score stage."""

from dataclasses import dataclass, field, fields

VERSION = 3


@dataclass
class ScoreConfig:
    """How neurons are ranked: by S_p, or by a plain measure to compare it with."""

    # s_p, taylor, wanda, frequency, contribution or random.
    method: str = field(
        default="s_p", metadata={"choices": ("s_p", "taylor", "wanda", "frequency", "contribution", "random")}
    )
    # How S_p joins activation A, gradient G and frequency F: weighted (a·A - g·G + f·F), product (Aᵃ·(1-G)ᵍ·Fᶠ) or
    # inverse_gradient ((a·A + f·F) / (1 + g·G)).
    form: str = field(default="weighted", metadata={"choices": ("weighted", "product", "inverse_gradient")})
    # How A, G and F are made comparable within a layer: zscore, rank or minmax. product and inverse_gradient then
    # stretch each term to 0..1.
    normalisation: str = field(default="rank", metadata={"choices": ("zscore", "rank", "minmax")})
    # Weight a of high activation.
    activation_weight: float = field(default=1.0, metadata={"minimum": 0})
    # Weight g of a low gradient.
    gradient_weight: float = field(default=0.25, metadata={"minimum": 0})
    # Weight f of high frequency, the share of tokens where the neuron is among the most active.
    frequency_weight: float = field(default=0.25, metadata={"minimum": 0})

    @property
    def needs_gradients(self) -> bool:
        """Whether nothing is left of the score after a forward-only scan."""
        alone = self.method == "s_p" and not (self.activation_weight or self.frequency_weight)
        return self.method == "taylor" or alone

    def unread(self) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        if self.method == "s_p":
            return {}
        return {spec.name: f"score.method={self.method}" for spec in fields(self) if spec.name != "method"}
