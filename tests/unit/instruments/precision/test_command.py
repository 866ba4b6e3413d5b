"""python -m pipeline auto_diff: any model of a Python file, and a sample that is only read."""

import json
import sys
from fractions import Fraction

import pytest
import torch

from instruments.precision.command import main

D = 48


CODE = """
import torch
from torch import nn
from parts import WIDTH

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.factor = nn.Linear(WIDTH, 5), factor

    def forward(self, x, shift=0.0):
        return self.line(x) * self.factor + shift

def broken():
    return Net(1e6)

number = 3
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "parts.py").write_text(f"WIDTH = {D}\n")
    torch.save({"x": torch.ones(3, D), "shift": 0.5}, tmp_path / "sample.pt")
    return tmp_path


def test_the_command_takes_a_file_and_a_sample(files, capsys):
    words = ["--model", f"{files}/net.py:Net", "--input", f"{files}/sample.pt"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("FP32 against bfloat16 (autocast): ok\noutput ")
    torch.save(torch.ones(3, D), files / "tensor.pt")
    out = ["--json", f"{files}/diff.json", "--plot", f"{files}/diff.png", "--precision", "fp16", "--mode", "cast"]
    assert main(["--model", f"{files}/net.py:broken", "--input", f"{files}/tensor.pt", *out]) == 1
    assert "severe: the first divergence is (model) (Net), which errs itself" in capsys.readouterr().out
    assert json.loads((files / "diff.json").read_text())["verdict"] == "severe"
    assert (files / "diff.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_runs_no_pickle_and_explains_what_is_wrong(files, capsys):
    torch.save({"x": Fraction(1, 2)}, files / "object.pt")
    for model, given, code, where in (
        ("net.py:Net", "object.pt", 1, "object.pt"),
        ("net.py:Net", "none.pt", 2, "--input"),
        ("nets.py:Net", "sample.pt", 2, "--model"),
        ("net.py", "sample.pt", 2, "--model"),
        ("net.py:Model", "sample.pt", 2, "--model"),
        ("net.py:number", "sample.pt", 2, "--model"),
    ):
        assert main(["--model", f"{files}/{model}", "--input", f"{files}/{given}"]) == code
        assert f"{where}\n  do: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "FILE.py is your own code and is run" in capsys.readouterr().out
