"""The benchmarks run and report every row; the figures of a tiny model have no meaning."""

import json
import math
import sys

import pytest
from benchmarks.__main__ import main
from benchmarks.moe_speed import shape_of
from pico import write_pico

from models.config import MoEShape

GROUPS = ["scan", "forward", "scanner", "memory", "mscan", "moe", "dump", "watch"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_every_row_is_measured(tmp_path, capsys):
    folder, found = write_pico(tmp_path / "pico", "qwen3", hidden=40, intermediate=80), tmp_path / "found.json"
    sizes = ["--tokens", "24", "--length", "8", "--repetitions", "1", "--device", "cpu"]
    moe = ["--experts", "5", "--active", "0.5", "0.3", "--steps", "2"]
    assert main(["--model", str(folder), *sizes, *moe, "--json", str(found), "--only", *GROUPS]) == 0
    record = json.loads(found.read_text())
    # 28 of the MoE: for 1 and 32 sequences, dense and two shares by three ways, in prompts and while decoding.
    assert len({row["what"] for row in record["rows"]}) == 25 + 28
    assert all(len(row["values"]) == 1 and math.isfinite(row["measured"]) for row in record["rows"])
    assert record["facts"]["batch"] == "3 × 8"
    table = capsys.readouterr().out
    assert all(row["what"] in table for row in record["rows"])


def test_shapes_are_those_of_a_carve():
    assert shape_of(1024, 16, 0.5) == MoEShape(16, 64, 4, 256)
    assert shape_of(1024, 16, 0.25) == MoEShape(16, 64, 2, 128)


def test_a_model_that_is_not_there_is_said(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none"), "--only", "watch"]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err
