"""RULES.md: every example reports what its row says, and its healthy twin reports nothing."""

import re
from pathlib import Path

import pytest

import instruments
from instruments.precision.findings import Diff
from instruments.precision.tensor_analysis import TensorAnalysis

PAGE = (Path(instruments.__file__).parent / "RULES.md").read_text(encoding="utf-8")
SETUP = re.search(r"```python\n(.*?)```\n", PAGE, re.DOTALL)[1]
WATCH = Path(instruments.__file__).parent / "training_watch"
ROWS = re.findall(r"^\| `([^`]+)` \| (.*?) \| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)


def read(result):
    """The report as text, and whether it contains a finding."""
    if isinstance(result, Diff):
        return str(result), result.verdict != "ok"
    if isinstance(result, TensorAnalysis):
        verdicts = {loss.verdict for loss in result.losses}
        return str(result), verdicts != {"ok"} or bool(result.advice or result.notes)
    return "\n".join(f"{one.kind} {one.severity}: {one.message}" for one in result), bool(result)


@pytest.mark.parametrize(
    ("says", "when", "example", "healthy"), ROWS, ids=[f"{row[0]} {n}" for n, row in enumerate(ROWS)]
)
def test_example_and_healthy_twin(says, when, example, healthy):
    space = {}
    exec(compile(SETUP, "RULES.md", "exec"), space)
    text, found = read(eval(example, space))
    assert says in text
    assert found or when.startswith("note")
    text, found = read(eval(healthy, space))
    assert says not in text
    assert not found, text


def test_every_finding_of_watch_model_has_a_row():
    code = "".join(file.read_text(encoding="utf-8") for file in WATCH.glob("*.py"))
    assert set(re.findall(r'Anomaly\(\s*"(\w+)"', code)) <= {row[0].split()[0] for row in ROWS}
    assert len(ROWS) == PAGE.count("\n| `")
