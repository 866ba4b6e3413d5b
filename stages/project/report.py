"""What the projection tells the user."""

from collections.abc import Sequence

from models.config import MoEShape
from stages.artifacts.job import Table
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome
from stages.project.layer_pass import Outcome


def summarise(
    outcomes: Sequence[Outcome],
    project: ProjectConfig,
    gradients: ProjectionOutcome | None,
    shape: MoEShape,
    width: int,
    tokens: int,
    asked: int,
) -> Table:
    """One row per layer: relative error of the FFN's output on validation tokens after each step."""
    rows = [
        [
            layer,
            f"{outcome.error_start:.4f}",
            "-" if outcome.error_aligned is None else f"{outcome.error_aligned:.4f}",
            "-" if outcome.penalty is None else f"{outcome.penalty:g}",
            outcome.rounds,
            f"{outcome.error_end:.4f}",
        ]
        for layer, outcome in enumerate(outcomes)
    ]
    columns = [
        "layer",
        "error as cut",
        "after alignment",
        "ridge penalty",
        "router rounds",
        "error at the end of alignment",
    ]
    notes = [describe(outcomes, project, gradients), *alignment_needs(project, shape, width, tokens, asked)]
    return Table("project", columns, rows, notes)


def alignment_needs(project: ProjectConfig, shape: MoEShape, width: int, tokens: int, asked: int) -> list[str]:
    """What the alignment would want of calibration text, where there is less.

    A routed neuron is seen on the share K/E of the tokens, and its column wants as many of them as there are columns.

    Args:
        project: settings of the stage.
        shape: of the carve.
        width: F.
        tokens: that the calibration text has ...
        asked: ... and `data.tokens`, which it may fall short of: then a longer text is needed, too.
    """
    columns = min(width, shape.always_on + shape.experts * shape.n)
    wanted = round(columns / (1 - project.validation_share) * max(1.0, shape.experts / shape.top_k))
    if project.alignment == "none" or tokens >= wanted:
        return []
    # The last sequence is cut to fit, and left out where one token is left of it.
    advice = f"data.tokens={-(-(wanted + 1) // 1000) * 1000}"
    short = f"; the text ends after {tokens:,} tokens, so a longer one is needed, too" if tokens + 1 < asked else ""
    return [
        f"{tokens:,} calibration tokens for {columns:,} columns a layer, routed to {shape.top_k} of {shape.experts} "
        f"experts: the alignment leans on its penalty; {wanted:,} would determine it ({advice}{short})"
    ]


def describe(outcomes: Sequence[Outcome], project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in a sentence."""
    aligned = sum(outcome.penalty is not None for outcome in outcomes)
    alignment = f"ridge in {aligned} of {len(outcomes)} layers" if project.alignment == "ridge" else "off"
    rounds = sum(outcome.rounds for outcome in outcomes)
    said = [f"alignment {alignment}"]
    said += [f"{rounds} rounds of router and alignment kept"] if rounds else []
    said += [f"{project.descent_steps} steps of layer-wise descent"] if project.descent_steps else []
    return "; ".join([*said, describe_gradients(gradients)])


def describe_gradients(outcome: ProjectionOutcome | None) -> str:
    """What gradient projection came to."""
    if outcome is None:
        return "gradient projection off"
    if not outcome.rounds:
        return "gradient projection tried and undone: no step lowered the KL on validation tokens"
    return (
        f"gradient projection in {outcome.rounds} rounds ({outcome.tokens:,} tokens, λ {outcome.length:g}): KL to the "
        f"dense model on validation tokens {outcome.before:.4f} → {outcome.after:.4f}"
    )
