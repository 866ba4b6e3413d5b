"""Every experiment is an entry of the log: what was asked, how to repeat it, what came out, what follows."""

import shlex

import pytest
from config.experiment_log import PARTS, expand_sweep, read_entry

from pipeline.help import group_lines
from pipeline.layout import CONF
from pipeline.overrides import override_errors
from pipeline.settings import compose, register_schema

FOLDER = CONF / "experiment"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# A line of the help page is 120 columns; the option's name takes 26 of them.
LONGEST = 94


def entry(name):
    return read_entry((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_entry_is_complete(name):
    parts = entry(name)
    assert tuple(parts) == PARTS
    assert len(parts["Question"][0]) <= LONGEST
    assert parts["Question"][0].endswith("?")
    assert all("not run" not in line for part in ("Result", "Verdict") for line in parts[part])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_its_commands_run_it(name):
    """Every one composes, a sweep at both ends of its values; the first one is of this very experiment."""
    register_schema()
    commands = [shlex.split(line) for line in entry(name)["Command"]]
    assert f"experiment={name}" in commands[0]
    for command in commands:
        assert command[:3] == ["python", "-m", "pipeline"]
        words = command[3:]
        assert not override_errors([word for word in words if word != "-m"], sweep="-m" in words)
        combinations = expand_sweep(words)
        compose(combinations[0])
        if len(combinations) > 1:
            compose(combinations[-1])


def test_every_experiment_sets_something():
    register_schema()
    plain, _folder = compose([])
    assert [name for name in EXPERIMENTS if compose([f"experiment={name}"])[0] == plain] == []


def test_the_help_page_has_a_line_for_each():
    lines = [line.split(maxsplit=1) for line in group_lines()]
    shown = {words[0]: words[1].strip() for words in lines if len(words) == 2}
    assert {name: shown[name] for name in EXPERIMENTS} == {name: entry(name)["Question"][0] for name in EXPERIMENTS}


def test_an_entry_is_read_to_its_last_line():
    question = "# Question: Why?\n#   And how?\n"
    text = f"# @package _global_\n{question}# Command: a\n#   b\n# Result: c\n# Verdict: d\n# A dial.\nn: 1\n"
    assert read_entry(text) == {
        "Question": ["Why?", "And how?"],
        "Command": ["a", "b"],
        "Result": ["c"],
        "Verdict": ["d"],
    }


def test_a_sweep_is_every_combination():
    assert expand_sweep(["seed=0,1"]) == [["seed=0,1"]]
    assert expand_sweep(["-m", "seed=0,1", "evaluate.baselines=[a,b],[c]", "n=5"]) == [
        ["seed=0", "evaluate.baselines=[a,b]", "n=5"],
        ["seed=0", "evaluate.baselines=[c]", "n=5"],
        ["seed=1", "evaluate.baselines=[a,b]", "n=5"],
        ["seed=1", "evaluate.baselines=[c]", "n=5"],
    ]
