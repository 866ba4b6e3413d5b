"""rules.toml: every rule finds its example at the marked lines, and nothing in the healthy twin."""

import pytest

from instruments.static_check import check
from instruments.static_check.source import GRADES, RULES

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.amp import GradScaler, autocast

"""
EXAMPLES = {f"{code} {name}": text for code, rule in RULES.items() for name, text in rule["examples"].items()}


def test_every_rule_has_a_severity_a_reason_a_remedy_and_an_example():
    for rule in RULES.values():
        assert rule["severity"] in GRADES
        assert rule["why"]
        assert rule["fix"]
        assert rule["examples"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_finds_its_example_and_nothing_in_the_healthy_twin(name, tmp_path):
    lines, file = EXAMPLES[name].splitlines(), tmp_path / "train.py"
    risky, healthy = (HEAD + "".join(f"{line[1:]}\n" for line in lines if line[:1] != mark) for mark in "+-")
    file.write_text(risky)
    expected = {number for number, line in enumerate(risky.splitlines(), 1) if line.endswith("# !")}
    assert expected
    assert {one.line for one in check.static_check(file).findings if one.code == name[:5]} == expected
    file.write_text(healthy)
    assert [str(one) for one in check.static_check(file).findings] == []
