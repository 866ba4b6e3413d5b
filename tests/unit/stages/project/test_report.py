from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome, describe_gradients
from stages.project.layer_pass import Outcome
from stages.project.stage import describe, summarise


def test_gradient_projection_that_was_undone_has_no_figures():
    assert "0.5000 → 0.2500" in describe_gradients(ProjectionOutcome(0.5, 0.25, 24, 336, 0.005))
    said = describe_gradients(ProjectionOutcome(0.5, 0.5, 0, 0, 0.005))
    assert "undone" in said
    assert not any(sign.isdigit() for sign in said)


def test_descent_is_counted_where_it_was_kept():
    outcomes = {0: Outcome(0.5, 0.3, 0.1, error_end=0.3), 2: Outcome(0.5, 0.3, None, 1, descended=True, error_end=0.2)}
    said = describe(outcomes, ProjectConfig(descent_steps=7), None)
    assert said == (
        "alignment ridge in 1 of 2 layers; 1 rounds of router and alignment kept; 7 steps of layer-wise descent in 1 "
        "of 2 layers; gradient projection off"
    )
    for steps, column in ((7, "error after descent"), (0, "error at the end")):
        settings = ProjectConfig(descent_steps=steps)
        table = summarise(outcomes, [describe(outcomes, settings, None)], settings)
        assert [dict(zip(table.columns, row, strict=True))[column] for row in table.rows] == ["0.3000", "0.2000"]
        assert ("descent" in table.notes[0]) == (steps > 0)
