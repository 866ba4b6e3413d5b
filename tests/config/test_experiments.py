"""The commands of conf/experiment/LOG.md."""

import re
import shlex
from functools import cache
from itertools import product

import pytest

from pipeline.check import find_errors
from pipeline.help import CONF
from pipeline.overrides import override_errors
from pipeline.settings import compose

LOG = (CONF / "experiment/LOG.md").read_text(encoding="utf-8")
COMMANDS = sorted({*re.findall(r"^    (python -m pipeline .*)$", LOG, re.M)})


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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_log_runs(command):
    """The command has no wrong setting; of a sweep, neither has the first nor the last combination."""
    words = shlex.split(command)[3:]
    assert not override_errors([word for word in words if word != "-m"], sweep="-m" in words)
    combinations = expand_sweep(words)
    for combination in {tuple(combinations[0]), tuple(combinations[-1])}:
        settings = composed(*combination)
        if settings.model.kind == "embedded" and settings.data.kind == "python_stdlib":  # others have to be there
            assert find_errors(settings, combination) == []


def test_the_log_stays_short():
    assert len(LOG.splitlines()) <= 600
