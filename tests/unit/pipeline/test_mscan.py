"""`python -m pipeline mscan` as users meet it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pyarrow.parquet import read_table
from unit.instruments.parameter_scan.recordings import INPUTS, OUTPUTS, PARAMETERS, WIDTH, P, record

from instruments.parameter_scan import command as mscan
from instruments.parameter_scan.command import main
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.writer import MscanWriter

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "scan.mscan"
    settings = {"created": "2026-01-02", "metadata": {"data": "text"}, "segment_sequences": 2}
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, **settings) as writer:
        writer.add(record([0, 1, 2]))
        unmeasured = record([7])
        unmeasured.gradient_BP.fill_(np.nan)
        writer.add(unmeasured, numbers=[7])
    return path


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_summary_of_a_file_that_was_not_closed(file, run):
    with file.open("ab") as torn:
        torn.write(b"half a segment")
    code, out, err = run(file)
    assert code == 1
    assert err.startswith(f"{file.name} was not closed: its end is missing, or its writer is still at work\n")
    facts, table = out.split("\n\n")
    assert {"model       pico", "data        text"} < set(facts.splitlines())
    assert "sequences   4 of 12 tokens in 2 segments" in facts
    assert "torn tail   54 bytes that a killed writer had not sealed; not read" in facts
    _head, _rule, *rows = (line.split("  ") for line in table.splitlines())
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:4] for row in rows] == [
        ["model.embed_tokens", "1", "0", "3"],
        ["model.layers.*.self_attn.q_proj", "2", "6", "4"],
        ["model.layers.*.mlp.down_proj", "1", "6", "3"],
    ]
    scan = read_mscan(file)
    low, high = scan.activation()[:, [1, 3]].min(), scan.activation()[:, [1, 3]].max()
    assert rows[1][4] == f"{low:.3g} … {high:.3g}"
    assert {row[6] for row in rows} == {"12.50%"}
    bound = max(scan.error_bound(name)[[1, 3]].max() for name in ("activation", "gradient"))
    assert rows[1][7] == f"{bound:.1e}"


def test_parquet_is_the_long_table(file, run, tmp_path):
    out = tmp_path / "scan.parquet"
    code, said, _ = run(file, "--parquet", out)
    count = P + INPUTS + OUTPUTS
    assert code == 0
    assert f"{out}: {4 * count} rows\n" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scan.mscan", "scan.parquet"]
    rows = read_table(out).to_pylist()
    assert len(rows) == 4 * count
    scan = read_mscan(file)
    picked = {(row["sequence"], row["parameter"], row["table"], row["block"]): row for row in rows}
    assert len(picked) == len(rows)
    down = PARAMETERS[2].name
    row = picked[2, down, "input", 5]
    assert (row["name"], row["layer"], row["module"]) == ("text 2", 0, "model.layers.*.mlp.down_proj")
    assert row["activation"] == scan.input_blocks(down)[0][2, 5]
    assert row["gradient"] == scan.input_blocks(down)[1][2, 5]
    row = picked[1, down, "output", 2]
    assert (row["activation"], row["gradient"]) == (None, scan.output_blocks(down)[1, 2])
    row = picked[7, PARAMETERS[0].name, "total", None]
    assert (row["layer"], row["module"], row["gradient"]) == (None, "model.embed_tokens", None)
    assert row["activation"] == scan.activation()[3, 0]


def test_parquet_has_the_tokens_of_a_file_that_has_them(run, tmp_path):
    path, numbers = tmp_path / "tokens.mscan", range(3)
    found = record(numbers, per_token=True)
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, per_token=True, encoding="f32") as writer:
        writer.add(found, numbers)
    run(path, "--parquet", tmp_path / "tokens.parquet")
    rows = [row for row in read_table(tmp_path / "tokens.parquet").to_pylist() if row["table"] == "token"]
    expected = [
        (number, token, parameter.name, activation[token, column].item(), gradient[token, column].item())
        for number, activation, gradient in zip(numbers, found.token_activation, found.token_gradient, strict=True)
        for token in range(len(activation))
        for column, parameter in enumerate(PARAMETERS)
    ]
    keys = ("sequence", "token", "parameter", "activation", "gradient")
    assert [tuple(row[key] for key in keys) for row in rows] == expected
    assert {row["block"] for row in rows} == {None}


def test_the_picture(file, run, tmp_path):
    out = tmp_path / "all.png"
    code, said, _ = run(file, "--delta-sc", out)
    assert code == 0
    assert str(out) in said
    assert out.read_bytes().startswith(b"\x89PNG")


def test_wrong_commands_are_refused(file, run, tmp_path, monkeypatch):
    before, missing, folder = file.read_bytes(), tmp_path / "missing.mscan", tmp_path / "no"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for words, expected, what in (
        ((missing,), 1, "cannot read missing.mscan: No such file or directory"),
        ((tmp_path,), 1, f"cannot read {tmp_path.name}: Is a directory"),
        ((missing, "--parquet", folder / "out"), 2, f"there is no folder {folder}"),
        ((missing, "--delta-sc", folder / "out"), 2, f"there is no folder {folder}"),
        ((file, "--parquet", file), 2, f"{file} is the .mscan file itself"),
        ((file, "--delta-sc", tmp_path), 2, f"{tmp_path} is a folder"),
        ((file, "--parquet", tmp_path / "out"), 2, "--parquet needs pyarrow, which is not installed"),
    ):
        code, _, err = run(*words)
        assert (code, err.splitlines()[0]) == (expected, what)
    assert file.read_bytes() == before


def test_it_starts_without_torch(file):
    code = (
        "import sys; from instruments.parameter_scan.command import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules); sys.exit(code)"
    )
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code, file], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 3


def test_a_closed_pipe_is_no_error(file):
    command = f"{sys.executable} -m pipeline mscan {file} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupted(file, run, monkeypatch):
    def interrupt(_path):
        raise KeyboardInterrupt

    monkeypatch.setattr(mscan, "read_mscan", interrupt)
    assert run(file) == (130, "", "")
