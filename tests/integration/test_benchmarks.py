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
    "  of it: probes, h computed again",
    "  of it: sums of |h| and h², largest |h|",
    "  of it: which neurons are active",
    "  of it: bits of active neurons",
    "  of it: Taylor",
    "  of it: norms: Gram matrices",
    "  of it: norms: quadratic forms",
    "  of it: to the host, into the sums",
    "  of it: not explained by these",
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
    *(
        f"{name}: {what}"
        for name in ("neurons", "weight of up")
        for what in (
            "Gram ÷ direct product, length 64",
            "Gram ÷ direct product, length 128",
            "break-even length, measured",
            "break-even length in the code",
            "measured ÷ code's",
            "product chosen ÷ the faster one, worst length",
        )
    ),
    ".mscan write of a sequence, f32 ÷ its scan",
    ".mscan write of a sequence, log16 ÷ its scan",
    "start-up of python -m pipeline --help",
    *(
        f"training step with the dump, {how} ÷ without"
        for how in (
            "disabled",
            "between two dumped steps",
            "statistics only",
            "every tensor",
            "every tensor, until it is on the disk",
        )
    ),
    "memory for tensors on their way, most used",
    "dump ÷ plain copying of the same bytes to the disk",
    "dump ÷ one .pt a tensor, written",
    "dump ÷ plain bytes, read",
    "dump ÷ one .pt a tensor, read",
    "training step with the monitor, gradients alone ÷ without",
    "training step with the monitor, gradients and outputs ÷ without",
]
GROUPS = ["scan", "forward", "scanner", "memory", "products", "mscan", "startup", "dump", "watch"]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_every_row_is_measured(tmp_path, capsys):
    folder, found = write_pico(tmp_path / "pico", "qwen3", hidden=40, intermediate=72), tmp_path / "found.json"
    sizes = ["--tokens", "24", "--length", "8", "--longest", "128", "--repetitions", "1", "--device", "cpu"]
    assert main(["--model", str(folder), *sizes, "--json", str(found), "--only", *GROUPS]) == 0
    record = json.loads(found.read_text())
    assert [row["what"] for row in record["rows"]] == ROWS
    assert all(len(row["values"]) == 1 and math.isfinite(row["measured"]) for row in record["rows"])
    assert record["facts"]["batch"] == "3 × 8"
    table = capsys.readouterr().out
    assert all(name in table for name in ROWS)


def test_a_model_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none"), "--only", "startup"]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err
