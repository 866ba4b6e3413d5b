"""`python -m pipeline mscan` as users meet it."""

import csv

import numpy as np
import pytest
from unit.instruments.parameter_scan.recordings import PARAMETERS, WIDTH, record

from instruments.parameter_scan import writer as segment_file
from instruments.parameter_scan.command import delta_sc, main
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.writer import MscanWriter


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "scan.mscan"
    monkeypatch.setattr(segment_file, "SEGMENT_SEQUENCES", 2)
    settings = {"created": "2026-01-02", "metadata": {"data": "text"}}
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
    _head, *rows = (line.split("  ") for line in table.splitlines())
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


def numbers_in(path):
    with path.open(newline="") as table:
        return {row["parameter"]: row["delta_sc"] for row in csv.DictReader(table)}


def test_numbers_of_a_scan_and_of_two_subtracted(file, run, tmp_path):
    scan, names = read_mscan(file), [parameter.name for parameter in PARAMETERS]
    expected = delta_sc(scan.activation(), scan.gradient())
    assert run(file, "--delta-sc", tmp_path / "all.csv")[0] == run(file, "--delta-sc", tmp_path / "all.png")[0] == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert numbers_in(tmp_path / "all.csv") == dict(zip(names, map(str, expected), strict=True))
    with MscanWriter(tmp_path / "other.mscan", PARAMETERS, model="pico", block_width=WIDTH) as writer:
        unmeasured = record([0])
        unmeasured.gradient_BP[:, 2] = np.nan
        writer.add(unmeasured)
    other = read_mscan(tmp_path / "other.mscan")
    assert run(file, "--minus", other.path, "--delta-sc", tmp_path / "two.csv")[0] == 0
    found = numbers_in(tmp_path / "two.csv")
    difference = expected - delta_sc(other.activation(), other.gradient())
    assert found == dict(zip(names, map(str, difference), strict=True)) | {names[2]: ""}
    run(file, "--minus", file, "--delta-sc", tmp_path / "none.csv")
    assert {*numbers_in(tmp_path / "none.csv").values()} == {"0.0"}


def test_wrong_commands_are_refused(file, run, tmp_path):
    before, missing, folder = file.read_bytes(), tmp_path / "missing.mscan", tmp_path / "no"
    for words, expected, name in (
        ((missing,), 1, missing.name),
        ((tmp_path,), 1, tmp_path.name),
        ((missing, "--delta-sc", folder / "out"), 2, folder),
        ((file, "--delta-sc", file), 2, file),
        ((file, "--delta-sc", tmp_path), 2, tmp_path),
    ):
        code, _, err = run(*words)
        assert (code, str(name) in err) == (expected, True)
    assert file.read_bytes() == before
