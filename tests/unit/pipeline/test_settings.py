"""The table of stages matches the stages."""

import ast
from pathlib import Path

import pytest

from pipeline.help import REPOSITORY
from pipeline.settings import CHAIN


@pytest.mark.parametrize("stage", CHAIN, ids=lambda stage: stage.name)
def test_a_stage_is_handed_what_its_run_asks_for(stage):
    tree = ast.parse(Path(REPOSITORY / "stages" / stage.name / "stage.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert [argument.arg for argument in run.args.args] == ["job"]
    assert tuple(argument.arg for argument in run.args.kwonlyargs) == stage.nodes
