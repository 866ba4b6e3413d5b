"""Settings of the score stage."""

from dataclasses import dataclass

VERSION = 1


@dataclass
class ScoreConfig:
    """How units are ranked. All measures are always computed; `method` names the one that later stages rank by."""

    # s_p, taylor, wanda, frequency, contribution or random.
    method: str = "s_p"
    # How S_p joins activation A, gradient G and frequency F: weighted (a·A - g·G + f·F), product (Aᵃ·(1-G)ᵍ·Fᶠ) or
    # inverse_gradient ((a·A + f·F) / (1 + g·G)).
    form: str = "weighted"
    # How A, G and F are made comparable within a layer: zscore, rank or minmax. product and inverse_gradient then
    # stretch each term to 0..1.
    normalisation: str = "zscore"
    # Weight a of high activation, mean |h|. At least 0.
    activation_weight: float = 1.0
    # Weight g of a low gradient, mean norm of the unit's weight gradients. At least 0.
    gradient_weight: float = 0.5
    # Weight f of high frequency, the share of tokens where the unit is among the most active. At least 0.
    frequency_weight: float = 0.5
