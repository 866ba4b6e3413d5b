"""RULES.md: every rule finds its example at the marked lines, and nothing in the healthy twin."""

import re
from pathlib import Path

import pytest

from instruments.static_check import check
from instruments.static_check.rules import RULES

PAGE = Path(check.__file__).with_name("RULES.md").read_text(encoding="utf-8")
BLOCK = r"```python\n(.*?)```\n"
HEAD = re.search(BLOCK, PAGE, re.DOTALL)[1]


def read_examples():
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for name, risky, healthy in re.findall(rf"^(\S[^\n]*):\n\n{BLOCK}\n{BLOCK}", section, re.DOTALL | re.MULTILINE):
            yield pytest.param(section[:5], risky, healthy, id=f"{section[:5]} {name}")


EXAMPLES = list(read_examples())


def test_every_rule_has_an_example():
    assert {example.values[0] for example in EXAMPLES} == set(RULES)
    assert len(EXAMPLES) == PAGE.count("\n```python\n") // 2


@pytest.mark.parametrize(("rule", "risky", "healthy"), EXAMPLES)
def test_rule_and_healthy_twin(rule, risky, healthy, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(HEAD + risky)
    expected = {number for number, line in enumerate((HEAD + risky).splitlines(), 1) if line.endswith("# !")}
    assert expected
    assert {one.line for one in check.static_check(file).findings if one.code == rule} == expected
    file.write_text(HEAD + healthy)
    assert [str(one) for one in check.static_check(file).findings] == []
