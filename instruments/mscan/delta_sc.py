"""ΔSC = z(activation) - z(gradient): which weights work much and would change little."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32
from numpy.typing import NDArray

from instruments.mscan.header import locate

@dataclass(frozen=True)
class Grid:
    """One value per layer and module, NaN where a layer has no such module; and those of weights outside the layers."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]  # within a layer: self_attn.q_proj
    values_LM: NDArray[np.float64]
    outside: dict[str, float]  # embed_tokens, lm_head


def delta_sc(
    activation_SP: Float32[np.ndarray, "S P"], gradient_SP: Float32[np.ndarray, "S P"]
) -> Float[np.ndarray, "P"]:
    """Mean over sequences of z(activation) - z(gradient), each z over the parameters of one sequence.

    Args:
        activation_SP: ``(S, P)`` norms of the inputs; NaN is not measured.
        gradient_SP: ``(S, P)`` norms of the gradients.
    Returns:
        ``(P,)`` float64; NaN for a parameter that no sequence measured both ways.
    Numerics: float64; a z-score without spread is 0.
    """
    difference_SP = _z(activation_SP) - _z(gradient_SP)
    measured_P = np.isfinite(difference_SP).sum(0)
    total_P = np.nansum(difference_SP, 0)
    return np.where(measured_P > 0, total_P / np.maximum(measured_P, 1), np.nan)


def grid_by_layer(names: Iterable[str], values_P: Float[np.ndarray, "P"]) -> Grid:
    """Lay values of parameters out by layer and module; modules keep the order in which they first appear."""
    placed = [(*locate(name), float(value)) for name, value in zip(names, values_P, strict=True)]
    layers = sorted({layer for layer, _, _ in placed if layer is not None})
    modules = list(dict.fromkeys(module for layer, module, _ in placed if layer is not None))
    outside, values_LM = {}, np.full((len(layers), len(modules)), np.nan)
    for layer, module, value in placed:
        if layer is None:
            outside[module] = value
        else:
            values_LM[layers.index(layer), modules.index(module)] = value
    return Grid(tuple(layers), tuple(modules), values_LM, outside)


def _z(values_SP: NDArray[np.float32]) -> NDArray[np.float64]:
    """Standard scores along each row; NaN stays NaN."""
    known_SP = np.isfinite(values_SP)
    count_S1 = np.maximum(known_SP.sum(1, keepdims=True), 1)
    centred_SP = values_SP - np.where(known_SP, values_SP, 0).sum(1, keepdims=True, dtype=np.float64) / count_S1
    spread_S1 = np.sqrt((np.where(known_SP, centred_SP, 0) ** 2).sum(1, keepdims=True) / count_S1)
    # Rounding leaves equal values a spread of some 1e-16 of their size.
    flat_S1 = spread_S1 <= 1e-12 * np.abs(np.where(known_SP, values_SP, 0)).max(1, keepdims=True, initial=0)
    return np.asarray(centred_SP * ~flat_S1 / np.where(flat_S1, 1, spread_S1))
