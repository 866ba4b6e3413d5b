"""What the projection tells the user."""

from collections.abc import Sequence

from stages.contracts.job import Table
from stages.project.config import ProjectConfig
from stages.project.layer import Outcome


def summarise(outcomes: Sequence[Outcome], project: ProjectConfig) -> Table:
    """One row per layer: relative error of the FFN's output on held-out calibration tokens after each step."""
    rows = [
        [
            layer,
            f"{outcome.error_start:.4f}",
            "-" if outcome.error_projected is None else f"{outcome.error_projected:.4f}",
            "yes" if outcome.projected else "no",
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
        "after gradient projection",
        "applied",
        "after alignment",
        "ridge penalty",
        "router rounds",
        "error at the end",
    ]
    return Table("project", columns, rows, [describe(outcomes, project)])


def describe(outcomes: Sequence[Outcome], project: ProjectConfig) -> str:
    """The projection in a sentence."""
    kept = sum(outcome.projected for outcome in outcomes)
    aligned = sum(outcome.penalty is not None for outcome in outcomes)
    gradient = f"applied in {kept} of {len(outcomes)} layers" if project.gradient_projection else "off"
    if project.gradient_projection and project.guard and kept < len(outcomes):
        gradient += " (dropped where it made the held-out alignment worse)"
    alignment = f"ridge in {aligned} of {len(outcomes)} layers" if project.alignment == "ridge" else "off"
    rounds = sum(outcome.rounds for outcome in outcomes)
    said = [f"base {project.base}", f"gradient projection {gradient}", f"alignment {alignment}"]
    said += [f"{rounds} rounds of router and alignment kept"] if rounds else []
    said += [f"{project.descent_steps} steps of layer-wise descent"] if project.descent_steps else []
    return "; ".join(said)
