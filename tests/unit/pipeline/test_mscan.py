"""`python -m pipeline.mscan` as users meet it."""

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


def test_the_summary(file, run):
    with file.open("ab") as torn:
        torn.write(b"half a segment")
    code, out, err = run(file)
    assert code == 1
    assert err == (
        f"{file.name} was not closed: its end is missing, or its writer is still at work\n"
        f"  where: {file}, after 4 sequences; 54 unusable bytes follow\n"
        "  do:    wait for the writer, copy the file again, or go on scanning into it\n"
    )
    facts, table = out.split("\n\n")
    assert facts.splitlines() == [
        f"file        {file} (.mscan version 3, {file.stat().st_size - 54:,} bytes)",
        "model       pico",
        "created     2026-01-02",
        "parameters  4, in blocks 4 wide",
        "sequences   4 of 12 tokens in 2 segments",
        "encoding    log16, 16 bits on each column's own logarithmic scale",
        "data        text",
        "torn tail   54 bytes that a killed writer had not sealed; not read",
    ]
    head, _rule, *rows = (line.split("  ") for line in table.splitlines())
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [cell.strip() for cell in head if cell.strip()] == [
        "module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured", "error up to",
    ]  # fmt: skip
    assert [row[:4] for row in rows] == [
        ["embed_tokens", "1", "0", "3"],
        ["self_attn.q_proj", "2", "6", "4"],
        ["mlp.down_proj", "1", "6", "3"],
    ]
    scan = read_mscan(file)
    low, high = scan.activation()[:, [1, 3]].min(), scan.activation()[:, [1, 3]].max()
    assert rows[1][4] == f"{low:.3g} … {high:.3g}"
    assert {row[6] for row in rows} == {"12.50%"}
    bound = max(scan.error_bound(name)[[1, 3]].max() for name in ("activation", "gradient"))
    assert rows[1][7] == f"{bound:.1e}"


def test_the_summary_of_one_sequence(file, run):
    for words in (["--sequence", "text 7"], ["--sequence", "7"]):
        code, out, _ = run(file, *words)
        assert code == 0
        assert "sequence    number 7, text 7, 3 tokens made\n" in out
        cells = out.split("\n\n")[1].splitlines()[2].split()
        assert cells[:4] == ["embed_tokens", "1", "0", "3"]
        assert cells[-3:-1] == ["–", "50.00%"]


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
    assert (row["name"], row["layer"], row["module"]) == ("text 2", 0, "mlp.down_proj")
    assert row["activation"] == scan.input_blocks(down)[0][2, 5]
    assert row["gradient"] == scan.input_blocks(down)[1][2, 5]
    row = picked[1, down, "output", 2]
    assert (row["activation"], row["gradient"]) == (None, scan.output_blocks(down)[1, 2])
    row = picked[7, PARAMETERS[0].name, "total", None]
    assert (row["layer"], row["module"], row["gradient"]) == (None, "embed_tokens", None)
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


def test_parquet_of_one_sequence(file, run, tmp_path):
    run(file, "--parquet", tmp_path / "one.parquet", "--sequence", "text 1")
    assert set(read_table(tmp_path / "one.parquet")["name"].to_pylist()) == {"text 1"}


def test_the_picture(file, run, tmp_path):
    for name, words in (("all.png", []), ("one.png", ["--sequence", "1"])):
        code, said, _ = run(file, "--delta-sc", tmp_path / name, *words)
        assert code == 0
        assert str(tmp_path / name) in said
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "one.png").read_bytes()


@pytest.mark.parametrize("flag", ["--parquet", "--delta-sc"])
def test_an_output_that_cannot_be_written_is_found_before_the_file_is_read(tmp_path, run, flag):
    code, out, err = run(tmp_path / "missing.mscan", flag, tmp_path / "no" / "where")
    assert (code, out) == (2, "")
    assert err == (
        f"there is no folder {tmp_path / 'no'}\n  where: {tmp_path / 'no' / 'where'}\n"
        f"  do:    mkdir -p {tmp_path / 'no'}\n"
    )


def test_the_file_itself_and_folders_are_no_output(file, run, tmp_path):
    before = file.read_bytes()
    code, _, err = run(file, "--parquet", file)
    assert (code, err) == (
        2,
        f"{file} is the .mscan file itself\n  where: command line\n  do:    name another output file\n",
    )
    assert file.read_bytes() == before
    code, _, err = run(file, "--delta-sc", tmp_path)
    assert (code, err) == (2, f"{tmp_path} is a folder\n  where: command line\n  do:    name another output file\n")


def test_without_pyarrow(file, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "instruments.parameter_scan.parquet", None)
    code, _, err = run(file, "--parquet", tmp_path / "out.parquet")
    assert (code, err) == (
        2,
        "--parquet needs pyarrow, which is not installed\n  where: command line\n"
        "  do:    pip install -e '.[parquet]'\n",
    )


def test_an_unknown_sequence(file, run):
    code, out, err = run(file, "--sequence", "text 5")
    assert (code, out) == (1, "")
    assert err.startswith("no sequence 'text 5'; there are 4\n")


def test_a_missing_file(run, tmp_path):
    code, _, err = run(tmp_path / "none.mscan")
    assert code == 1
    assert err == (
        f"cannot read none.mscan: No such file or directory\n  where: {tmp_path / 'none.mscan'}\n"
        "  do:    name a file that the scanner wrote\n"
    )


def test_a_folder_instead_of_a_file(run, tmp_path):
    code, _, err = run(tmp_path)
    assert code == 1
    assert err.startswith(f"cannot read {tmp_path.name}: Is a directory\n")


def test_words_that_are_no_settings(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--deltasc", "x"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --deltasc" in capsys.readouterr().err


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
    command = f"{sys.executable} -m pipeline.mscan {file} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupted(file, run, monkeypatch):
    def interrupt(_path):
        raise KeyboardInterrupt

    monkeypatch.setattr(mscan, "read_mscan", interrupt)
    assert run(file) == (130, "", "")
