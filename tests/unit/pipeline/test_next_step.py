"""Suggested commands and written files at the end of a stage that ran alone."""

import shlex

import pytest

from pipeline.artifacts import Manifest
from pipeline.plan import Step, find_checkpoint
from pipeline.run import NEXT, next_commands, written_files
from pipeline.settings import STAGES, compose, register_schema
from stages.artifacts.job import Table
from stages.diagnose.config import DiagnoseConfig


@pytest.mark.parametrize("stage", NEXT)
def test_the_commands_can_be_pasted_and_repeat_what_was_typed(stage):
    register_schema()
    commands = next_commands(stage, [f"stage={stage}", "fresh=true", "experts=3", "data.path=/my texts"])
    for command in commands:
        python, dash_m, package, *words = shlex.split(command)
        assert (python, dash_m, package) == ("python", "-m", "pipeline")
        assert words[:2] == ["experts=3", "data.path=/my texts"]
        settings, _folder = compose(words)
        assert settings.stage in STAGES
        assert settings.stage != stage
        assert not settings.fresh


@pytest.mark.parametrize("stage", ["evaluate", "dump", "diagnose"])
def test_nothing_follows_where_a_run_ends_for_good(stage):
    assert next_commands(stage, []) == []


def test_the_checkpoint_of_a_run_is_the_one_that_it_wrote_or_read_last(tmp_path):
    def step(name, *parents, **inputs):
        return Step(STAGES[name], "", {}, tmp_path / name, inputs, {parent: tmp_path / parent for parent in parents}, 0)

    for name in ("assemble", "project", "train"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    assert find_checkpoint([step("scan")]) is None
    assert find_checkpoint([step("scan"), step("assemble", "scan")]) == tmp_path / "assemble" / "checkpoint"
    assert find_checkpoint([step("evaluate", "assemble", "project")]) == tmp_path / "project" / "checkpoint"
    assert find_checkpoint([step("evaluate", "assemble", "project", "train")]) == tmp_path / "train" / "checkpoint"
    (tmp_path / "latest").symlink_to("train")
    looked = step("diagnose", diagnose=DiagnoseConfig(checkpoint=str(tmp_path / "latest" / "checkpoint")))
    assert find_checkpoint([looked]) == tmp_path / "train" / "checkpoint"
    assert find_checkpoint([step("diagnose", diagnose=DiagnoseConfig())]) is None
    (tmp_path / "project" / "checkpoint").rmdir()  # an evaluation of it is not one of the checkpoint of assemble
    assert find_checkpoint([step("evaluate", "assemble", "project")]) is None


def test_files_are_named_with_their_sizes_the_largest_first(tmp_path):
    files = {f"{number}.bin": {"size": number << 20, "sha256": ""} for number in range(9)}
    lines = written_files(tmp_path, Manifest("f", {}, files, Table("t", [], [])))
    assert lines[0] == f"{tmp_path / '8.bin'} (8.0 MiB)"
    assert len(lines) == 7
    assert lines[-1] == "and 3 smaller; manifest.json lists all"
