"""Reads conf/experiment/: the header of each file, and the entries of LOG.md."""

import re
from dataclasses import dataclass
from itertools import product

HEADER = "# @package _global_"
# How far commands reproduce a figure; the head of LOG.md explains each.
STATES = ("today", "then", "removed", "study")
COMMAND = re.compile(r"python -m pipeline .*")


@dataclass(frozen=True)
class Entry:
    """One section of LOG.md."""

    experiment: str
    date: str
    commits: list[str]
    state: str
    commands: list[str]
    rows: int
    verdict: str


def read_header(text):
    """Question and commands of an experiment's file; commands after the first are indented by two."""
    first, question, *lines = text.splitlines()
    assert first == HEADER
    asked = re.fullmatch(r"# Question: (.+\?)", question)
    assert asked, question
    opened = re.fullmatch(rf"# Command: ({COMMAND.pattern})", lines[0])
    assert opened, lines[0]
    commands = [opened[1]]
    for line in lines[1:]:
        more = re.fullmatch(rf"#   ({COMMAND.pattern})", line)
        if not more:
            break
        commands.append(more[1])
    return asked[1], commands


def read_log(text):
    """The entries in file order. Each must have a stamp and a verdict."""
    return [read_entry(section) for section in re.split(r"^## ", text, flags=re.M)[1:]]


def read_entry(section):
    title, _, body = section.partition("\n")
    stamp = re.search(r"^(\d{4}-\d\d-\d\d) · (?:after )?((?:`[0-9a-f]{7}` ?)+)· (\w+)$", body, re.M)
    verdict = re.search(r"^\*\*Verdict\.\*\* (.+)", body, re.M | re.S)
    assert stamp, title
    assert verdict, title
    return Entry(
        experiment=re.fullmatch(r"(\w+): .+", title)[1],
        date=stamp[1],
        commits=re.findall(r"`(\w+)`", stamp[2]),
        state=stamp[3],
        commands=re.findall(rf"^    ({COMMAND.pattern})$", body, re.M),
        rows=len(re.findall(r"^\|", body, re.M)),
        verdict=verdict[1].strip(),
    )


def expand_sweep(words):
    """All combinations that a command with `-m` runs; commas outside brackets separate the values of a key."""
    if "-m" not in words:
        return [words]
    choices = []
    for word in words:
        if word != "-m":
            key, _, values = word.partition("=")
            choices.append([f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)])
    return [list(chosen) for chosen in product(*choices)]
