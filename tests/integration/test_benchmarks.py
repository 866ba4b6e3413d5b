"""The benchmarks run and report every row; the figures of a tiny model have no meaning."""

import json
import math
import sys

import pytest
from benchmarks.__main__ import main
from pico import write_pico

ROWS = [
    "scan with all gradient statistics ÷ training step",
    "  of it: frozen forward + backward",
    "  of it: gradient norms",
    "  of it: probes, sums, Taylor, transfer",
    "forward-only scan ÷ forward pass with loss",
    "  of it: forward pass with the loss by sample",
    "parameter scanner, weights frozen ÷ training step, batch 3",
    "training with the parameter scanner ÷ without, batch 3",
    "parameter scanner, weights frozen ÷ training step, batch 1",
    "training with the parameter scanner ÷ without, batch 1",
    "(scan's peak memory − frozen pass's) ÷ one layer's activations",
    "  scan's peak",
    "  frozen pass's peak",
    "  one layer's activations",
    ".mscan write of a sequence, f32 ÷ its scan",
    ".mscan write of a sequence, log16 ÷ its scan",
    *(f"training step with the dump, {how} ÷ without" for how in ("disabled", "statistics only", "every tensor")),
    "memory for tensors on their way, most used",
    "dump ÷ one .pt a tensor, written",
    "dump ÷ one .pt a tensor, read",
    "training step with the monitor, gradients alone ÷ without",
    "training step with the monitor, gradients and outputs ÷ without",
]
GROUPS = ["scan", "forward", "scanner", "memory", "mscan", "dump", "watch"]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_every_row_is_measured(tmp_path, capsys):
    folder, found = write_pico(tmp_path / "pico", "qwen3", hidden=40, intermediate=72), tmp_path / "found.json"
    sizes = ["--tokens", "24", "--length", "8", "--repetitions", "1", "--device", "cpu"]
    assert main(["--model", str(folder), *sizes, "--json", str(found), "--only", *GROUPS]) == 0
    record = json.loads(found.read_text())
    assert [row["what"] for row in record["rows"]] == ROWS
    assert all(len(row["values"]) == 1 and math.isfinite(row["measured"]) for row in record["rows"])
    assert record["facts"]["batch"] == "3 × 8"
    table = capsys.readouterr().out
    assert all(name in table for name in ROWS)


def test_a_model_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none"), "--only", "watch"]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err
