"""Suggested commands and written files at the end of a stage that ran alone."""

import shlex

import pytest

from pipeline.artifacts import Manifest
from pipeline.run import NEXT, next_commands, written_files
from pipeline.settings import STAGES, compose, register_schema
from stages.artifacts.job import Table


@pytest.mark.parametrize("stage", NEXT)
def test_the_commands_can_be_pasted_and_repeat_what_was_typed(stage):
    register_schema()
    _words, commands = next_commands(stage, [f"stage={stage}", "fresh=true", "experts=3", "data.path=/my texts"])
    for command in commands:
        python, dash_m, package, *words = shlex.split(command)
        assert (python, dash_m, package) == ("python", "-m", "pipeline")
        assert words[:2] == ["experts=3", "data.path=/my texts"]
        settings, _folder = compose(words)
        assert settings.stage in STAGES
        assert settings.stage != stage
        assert not settings.fresh


def test_after_assemble_the_way_to_the_checkpoint_to_use_is_said():
    words, commands = next_commands("assemble", ["stage=assemble", "experts=100", "n=256"])
    assert words == (
        "this checkpoint holds the experts as they were cut, for comparison; project aligns them with the dense model "
        "and writes the checkpoint to use"
    )
    assert commands == ["python -m pipeline experts=100 n=256 stage=project"]


@pytest.mark.parametrize("stage", ["evaluate", "dump", "diagnose"])
def test_nothing_follows_where_a_run_ends_for_good(stage):
    assert next_commands(stage, []) == ("", [])


def test_files_are_named_with_their_sizes_the_largest_first(tmp_path):
    files = {f"{number}.bin": {"size": number << 20, "sha256": ""} for number in range(9)}
    lines = written_files(tmp_path, Manifest("f", {}, files, Table("t", [], [])))
    assert lines[0] == f"{tmp_path / '8.bin'} (8.0 MiB)"
    assert len(lines) == 7
    assert lines[-1] == "and 3 smaller; manifest.json lists all"
