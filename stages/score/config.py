"""Settings of the score stage."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from instruments.errors import ConfigError

VERSION = 3


@dataclass
class ScoreConfig:
    """The score that ranks neurons: S_p, or a simple measure for comparison; explained in conf/score."""

    method: str = field(
        default="s_p", metadata={"choices": ("s_p", "taylor", "wanda", "frequency", "contribution", "random")}
    )
    activation_weight: float = field(default=1.0, metadata={"needs": {"method": "s_p"}, "minimum": 0})
    gradient_weight: float = field(default=0.25, metadata={"needs": {"method": "s_p"}, "minimum": 0})
    frequency_weight: float = field(default=0.25, metadata={"needs": {"method": "s_p"}, "minimum": 0})

    @property
    def needs_gradients(self) -> bool:
        """Whether the score has no term without gradients."""
        alone = self.method == "s_p" and not (self.activation_weight or self.frequency_weight)
        return self.method == "taylor" or alone

    def contradictions(self, *, gradients: bool) -> Iterator[ConfigError]:
        """Errors: the score ranks by nothing, or needs `gradients` that the scan does not compute."""
        weights = "score.activation_weight, score.gradient_weight and score.frequency_weight"
        if self.method == "s_p" and self.needs_gradients and not self.gradient_weight:
            what = "S_p ranks by nothing: the weights of its terms are 0"
            yield ConfigError(what, where=f"settings {weights}", do="score.activation_weight=1")
        elif self.needs_gradients and not gradients:
            what = f"score.method={self.method} needs gradients, and scan.gradients=false computes none"
            where = "settings score.method and scan.gradients"
            yield ConfigError(what, where=where, do="scan.gradients=true, or score.method=contribution")
