"""What the projection of a global pool tells the user."""

from stages.contracts.job import Table
from stages.contracts.pool_partition import PoolPartition
from stages.project.config import ProjectConfig
from stages.project.gradient_rounds import ProjectionOutcome
from stages.project.pool import PoolOutcome
from stages.project.report import describe_gradients

STEPS = ("as cut", "after alignment", "at the end")


def summarise_pool(
    outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None, partition: PoolPartition
) -> Table:
    """One row per layer: relative error of the FFN's output on held-out calibration tokens after each step."""
    rows = [
        [
            layer,
            given,
            *(f"{outcome.errors[step][layer]:.4f}" if step in outcome.errors else "-" for step in STEPS),
        ]
        for layer, given in enumerate(partition.given)
    ]
    columns = ["layer", "experts given", *(f"error {step}" for step in STEPS)]
    notes = [
        describe_pool(outcome, project, gradients),
        "all layers share the experts: errors are on the dense model's own inputs; in the carved one they add up from "
        "layer to layer, which is left to stage=train",
    ]
    return Table("project", columns, rows, notes)


def describe_pool(outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in a sentence."""
    aligned = "off" if project.alignment == "none" else "dropped, since no penalty made the held-out error better"
    if outcome.penalty is not None:
        aligned = f"ridge, {project.pool_sweeps} sweeps over the experts, penalty {outcome.penalty:g}"
    said = [f"base {project.base}", f"alignment {aligned}"]
    said += [f"{outcome.rounds} rounds of routers and alignment kept"] if outcome.rounds else []
    return "; ".join([*said, describe_gradients(gradients)])
