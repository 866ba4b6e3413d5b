"""Sweeps by Hydra, and the files under conf/."""

import logging
import sys

import pytest

from instruments.errors import ConfigError
from pipeline import cli
from pipeline import settings as composition
from pipeline.settings import register_schema


def test_a_sweep_carves_every_combination(tmp_path, monkeypatch):
    carved = []

    def carve(settings, folder, words, *, wait):
        assert wait  # for another job of the sweep that computes the same result
        carved.append((settings, folder, words))

    monkeypatch.setattr(cli, "run_pipeline", carve)
    words = ["-m", "experts=2,4", "score=s_p,wanda", f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["pipeline", *words])
    assert cli.run_command(words) == 0
    assert not logging.getLogger("stages.scan").disabled  # Hydra's own logging would disable the jobs' loggers
    assert [(settings.experts, settings.score.method) for settings, _, _ in carved] == [
        (2, "s_p"),
        (2, "wanda"),
        (4, "s_p"),
        (4, "wanda"),
    ]
    folders = [folder for _, folder, _ in carved]
    assert [folder.name for folder in folders] == ["0", "1", "2", "3"]
    assert {folder.parent.parent for folder in folders} == {tmp_path / "sweeps"}
    assert carved[1][2] == ["experts=2", "score=wanda", f"output_dir={tmp_path}"]


def test_a_failing_job_of_a_sweep_ends_with_its_message(tmp_path, monkeypatch, capsys):
    words = ["-m", "always_on=1024,2000", "stage=cluster", f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["pipeline", *words])
    assert cli.run_command(words) == 2
    error = capsys.readouterr().err
    assert "always_on=1024 leaves no neuron to route" in error
    assert "Traceback" not in error


def test_a_faulty_sweep_starts_nothing(tmp_path, capsys):
    assert cli.run_command(["-m", "experts=2,many", f"output_dir={tmp_path}"]) == 2
    assert (
        capsys.readouterr().err
        == "experts=many should be a whole number or null\n  where: command line\n  do:    experts=16\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_faulty_file_under_conf(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("defaults: [schema, _self_]\nexpert: 3\n")
    monkeypatch.setattr(composition, "CONF", tmp_path)
    register_schema()
    with pytest.raises(ConfigError) as caught:
        composition.compose([])
    assert caught.value.what == (
        "In 'config': ConfigKeyError raised while composing config: Key 'expert' not in 'Settings'"
    )
    assert caught.value.where == f"the files under {tmp_path} and the command line"
