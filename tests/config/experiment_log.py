"""The entry of the experiment log that opens a file of conf/experiment/."""

import re
from itertools import product

HEADER = "# @package _global_"
PARTS = ("Question", "Command", "Result", "Verdict")


def read_entry(text):
    """Part → its lines. A part opens with its name; further lines are indented by two.

    The entry ends with the first line that is neither, so that comments of settings are no part of it.
    """
    first, *lines = text.splitlines()
    assert first == HEADER
    parts = {}
    for line in lines:
        opened, more = re.fullmatch(r"# (\w+): (.+)", line), re.fullmatch(r"#   (\S.*)", line)
        if opened:
            assert opened[1] not in parts, f"{opened[1]} twice"
            parts[opened[1]] = [opened[2]]
        elif more and parts:
            parts[next(reversed(parts))].append(more[1])
        else:
            break
    return parts


def expand_sweep(words):
    """Every combination that a command with `-m` runs: commas outside of brackets part the values of a key."""
    if "-m" not in words:
        return [words]
    choices = []
    for word in words:
        if word != "-m":
            key, _, values = word.partition("=")
            choices.append([f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)])
    return [list(chosen) for chosen in product(*choices)]
