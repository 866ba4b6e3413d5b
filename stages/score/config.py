"""Settings of the score stage."""

from dataclasses import dataclass, field

VERSION = 3


@dataclass
class ScoreConfig:
    """The score that ranks neurons: S_p, or a simple measure for comparison; explained in conf/score."""

    method: str = field(
        default="s_p", metadata={"choices": ("s_p", "taylor", "wanda", "frequency", "contribution", "random")}
    )
    form: str = field(
        default="weighted",
        metadata={"needs": {"method": "s_p"}, "choices": ("weighted", "product", "inverse_gradient")},
    )
    normalisation: str = field(
        default="rank", metadata={"needs": {"method": "s_p"}, "choices": ("zscore", "rank", "minmax")}
    )
    activation_weight: float = field(default=1.0, metadata={"needs": {"method": "s_p"}, "minimum": 0})
    gradient_weight: float = field(default=0.25, metadata={"needs": {"method": "s_p"}, "minimum": 0})
    frequency_weight: float = field(default=0.25, metadata={"needs": {"method": "s_p"}, "minimum": 0})

    @property
    def needs_gradients(self) -> bool:
        """Whether the score has no term without gradients."""
        alone = self.method == "s_p" and not (self.activation_weight or self.frequency_weight)
        return self.method == "taylor" or alone
