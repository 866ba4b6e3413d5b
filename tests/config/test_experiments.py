"""Every experiment has a question, a command and settings; LOG.md holds its results."""

import shlex
from functools import cache
from itertools import pairwise

import pytest
from config.experiment_log import STATES, expand_sweep, read_entry, read_header, read_log

from pipeline.check import find_errors
from pipeline.help import CONF, group_lines
from pipeline.overrides import override_errors
from pipeline.settings import compose

FOLDER = CONF / "experiment"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
LOG = read_log((FOLDER / "LOG.md").read_text(encoding="utf-8"))
COMMANDS = sorted({command for entry in LOG for command in entry.commands})
# Entries about several experiments.
WITHOUT_FILE = {"baseline"}
# Columns of the help page (120) that the option's name (26) leaves.
LONGEST = 94
MOST_LINES = 12


@cache
def composed(*words):
    return compose(words)[0]


def read(name):
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_is_question_command_and_settings(name):
    question, commands = read_header(read(name))
    assert len(question) <= LONGEST
    assert len(read(name).splitlines()) <= MOST_LINES
    assert f"experiment={name}" in shlex.split(commands[0])
    for command in commands:
        check_command(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_log_runs(command):
    check_command(command)


@cache  # most are in the log and in an experiment
def check_command(command):
    """The command has no wrong setting; of a sweep, neither has the first nor the last combination."""
    program, words = shlex.split(command)[:3], shlex.split(command)[3:]
    assert program == ["python", "-m", "pipeline"]
    assert not override_errors([word for word in words if word != "-m"], sweep="-m" in words)
    combinations = expand_sweep(words)
    for combination in {tuple(combinations[0]), tuple(combinations[-1])}:
        settings = composed(*combination)
        if settings.model.kind == "embedded" and settings.data.kind == "python_stdlib":  # others have to be there
            assert find_errors(settings, combination) == []


def test_every_experiment_has_results_and_every_result_an_experiment():
    assert {entry.experiment for entry in LOG} == {*EXPERIMENTS, *WITHOUT_FILE}


def test_the_log_stays_short():
    assert len((FOLDER / "LOG.md").read_text(encoding="utf-8").splitlines()) <= 600


def test_the_log_is_newest_first():
    assert all(newer.date >= older.date for newer, older in pairwise(LOG))


def test_entries_are_complete():
    for entry in LOG:
        assert entry.state in STATES, entry
        assert entry.rows >= 3, entry  # header, rule and at least one line of figures
        assert entry.verdict, entry
        # Figures that a command reproduces need that command.
        assert entry.commands or entry.state in ("study", "removed"), entry
        assert all(f"experiment={entry.experiment}" in command or entry.experiment == "baseline"
                   for command in entry.commands), entry  # fmt: skip


def test_every_experiment_sets_something():
    assert [name for name in EXPERIMENTS if composed(f"experiment={name}") == composed()] == []


def test_the_help_page_has_a_line_for_each():
    lines = [line.split(maxsplit=1) for line in group_lines()]
    shown = {words[0]: words[1].strip() for words in lines if len(words) == 2}
    assert {name: shown[name] for name in EXPERIMENTS} == {name: read_header(read(name))[0] for name in EXPERIMENTS}


def test_a_header_ends_with_its_commands():
    commands = "# Command: python -m pipeline a\n#   python -m pipeline b\n"
    text = f"# @package _global_\n# Question: Why?\n{commands}# A dial.\nn: 1\n"
    assert read_header(text) == ("Why?", ["python -m pipeline a", "python -m pipeline b"])


def test_an_entry_is_read():
    entry = read_entry("a_b: c\n\n2026-01-02 · `0123456` `789abcd` · then\n\n    python -m pipeline d\n\n| e |\n|---|\n"
                       "| f |\n\n**Verdict.** g\nh\n")  # fmt: skip
    assert (entry.experiment, entry.date, entry.state) == ("a_b", "2026-01-02", "then")
    assert (entry.commits, entry.commands) == (["0123456", "789abcd"], ["python -m pipeline d"])
    assert (entry.rows, entry.verdict) == (3, "g\nh")


def test_a_sweep_is_every_combination():
    assert expand_sweep(["seed=0,1"]) == [["seed=0,1"]]
    assert expand_sweep(["-m", "seed=0,1", "evaluate.baselines=[a,b],[c]", "n=5"]) == [
        ["seed=0", "evaluate.baselines=[a,b]", "n=5"],
        ["seed=0", "evaluate.baselines=[c]", "n=5"],
        ["seed=1", "evaluate.baselines=[a,b]", "n=5"],
        ["seed=1", "evaluate.baselines=[c]", "n=5"],
    ]
