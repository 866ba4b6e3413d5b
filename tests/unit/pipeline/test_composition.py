"""Sweeps by Hydra, and the files under conf/."""

import ast
import logging
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from instruments.errors import ConfigError, DataError
from pipeline import cli
from pipeline import settings as composition
from pipeline.help import CONF, REPOSITORY
from pipeline.settings import CHAIN, compose


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


def test_wrong_settings_of_all_jobs_are_found_before_the_first(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(cli, "run_pipeline", None)
    words = ["-m", "always_on=0,1024", "seed=-1,1", "train.language_model=0", "stage=train", f"output_dir={tmp_path}"]
    assert cli.run_command(words) == 2
    negative, nothing, always_on = capsys.readouterr().err.split("\n\n")
    assert "setting seed; job 0, always_on=0 seed=-1; job 2, always_on=1024 seed=-1\n" in negative
    assert "nothing is minimised" in nothing
    assert "always_on=1024 leaves no neuron to route" in always_on
    assert "; job 3, always_on=1024 seed=1\n" in always_on
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ConfigError, DataError])
def test_a_failing_job_of_a_sweep_is_named_and_the_others_run(tmp_path, monkeypatch, capsys, error):
    done = []

    def carve(settings, folder, words, *, wait):
        done.append(settings.seed)
        if settings.seed < 2:
            raise error(f"no luck with {settings.seed}", where="here", do="another seed")

    monkeypatch.setattr(cli, "run_pipeline", carve)
    words = ["-m", "seed=0,1,2", f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["pipeline", *words])
    assert cli.run_command(words) == 1
    assert done == [0, 1, 2]
    said = capsys.readouterr().err
    assert said.startswith(
        "".join(
            f"job {seed}, seed={seed} output_dir={tmp_path}\n"
            f"no luck with {seed}\n  where: here\n  do:    another seed\n\n"
            for seed in (0, 1)
        )
    )
    assert said.endswith(
        "not every job of the sweep is done; the errors are above\n"
        "  do:    the same command again, which keeps all finished results\n"
    )


def test_a_program_with_a_hydra_of_its_own_keeps_it():
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        own = GlobalHydra.instance().hydra
        assert compose([])[0].experts == 16
        assert GlobalHydra.instance().hydra is own


def test_a_faulty_file_under_conf(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("defaults: [schema, _self_]\nexpert: 3\n")
    monkeypatch.setattr(composition, "CONF", tmp_path)
    with pytest.raises(ConfigError) as caught:
        composition.compose([])
    assert "Key 'expert' not in 'Settings'" in caught.value.what
    assert caught.value.where.startswith("the files under")


def test_a_number_in_a_file_turns_nothing_on(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("defaults: [schema, _self_]\noutput_dir: x\ntrain: {fsdp: '1'}\n")
    monkeypatch.setattr(composition, "CONF", tmp_path)
    with pytest.raises(ConfigError, match=r"train\.fsdp=1 is neither true nor false"):
        composition.compose([])


@pytest.mark.parametrize("stage", CHAIN, ids=lambda stage: stage.name)
def test_a_stage_is_handed_what_its_run_asks_for(stage):
    tree = ast.parse(Path(REPOSITORY / "stages" / stage.name / "stage.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert [argument.arg for argument in run.args.args] == ["job"]
    assert tuple(argument.arg for argument in run.args.kwonlyargs) == stage.nodes
