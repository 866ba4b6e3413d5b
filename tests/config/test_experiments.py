"""Every experiment has a question, a command and settings; LOG.md holds its results."""

import re
import shlex
from functools import cache
from itertools import product

import pytest

from pipeline.check import find_errors
from pipeline.help import CONF
from pipeline.overrides import override_errors
from pipeline.settings import compose

FOLDER = CONF / "experiment"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
LOG = (FOLDER / "LOG.md").read_text(encoding="utf-8")
COMMAND = r"python -m pipeline .*"
COMMANDS = sorted({*re.findall(rf"^    ({COMMAND})$", LOG, re.M)})
# Entries about several experiments.
WITHOUT_FILE = {"baseline"}


@cache
def composed(*words):
    return compose(words)[0]


def expand_sweep(words):
    """All combinations that a command with `-m` runs; commas outside brackets separate the values of a key."""
    if "-m" not in words:
        return [words]
    pairs = [word.partition("=")[::2] for word in words if word != "-m"]
    choices = [[f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)] for key, values in pairs]
    return [list(chosen) for chosen in product(*choices)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_is_question_command_and_settings(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    header = re.match(rf"# @package _global_\n# Question: .+\?\n# Command: ({COMMAND}(?:\n#   {COMMAND})*)\n", text)
    assert header, text
    commands = header[1].split("\n#   ")
    assert f"experiment={name}" in shlex.split(commands[0])
    for command in commands:
        check_command(command)
    assert composed(f"experiment={name}") != composed()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_log_runs(command):
    check_command(command)


@cache  # most are in the log and in an experiment
def check_command(command):
    """The command has no wrong setting; of a sweep, neither has the first nor the last combination."""
    words = shlex.split(command)[3:]
    assert not override_errors([word for word in words if word != "-m"], sweep="-m" in words)
    combinations = expand_sweep(words)
    for combination in {tuple(combinations[0]), tuple(combinations[-1])}:
        settings = composed(*combination)
        if settings.model.kind == "embedded" and settings.data.kind == "python_stdlib":  # others have to be there
            assert find_errors(settings, combination) == []


def test_every_experiment_has_results_and_every_result_an_experiment():
    assert {*re.findall(r"^## (\w+): ", LOG, re.M)} == {*EXPERIMENTS, *WITHOUT_FILE}


def test_the_log_stays_short():
    assert len(LOG.splitlines()) <= 600
