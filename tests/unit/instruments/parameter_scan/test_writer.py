from dataclasses import replace

import numpy as np
import pytest
from unit.instruments.parameter_scan.recordings import ARRAYS, PARAMETERS, WIDTH, record

from instruments.errors import ContractError
from instruments.parameter_scan import writer as buffer
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.writer import MscanWriter, merge_mscan

CREATED = "2026-01-02"


def write(path, groups, **settings):
    """One sealed segment per group of numbers."""
    settings = {"parameters": PARAMETERS, "model": "pico", "block_width": WIDTH, "encoding": "f32"} | settings
    with MscanWriter(path, **settings) as writer:
        for numbers in groups:
            writer.add(record(numbers), numbers=numbers)
            writer.seal()
    return path


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """One worker's scan without interruption, merged."""
    monkeypatch.setattr(buffer, "SEGMENT_SEQUENCES", 5)
    part = write(tmp_path / "whole.part", [range(23)])
    merge_mscan([part], tmp_path / "whole.mscan", created=CREATED)
    return tmp_path / "whole.mscan"


@pytest.mark.parametrize("seed", range(6))
def test_a_merged_file_does_not_depend_on_the_history(tmp_path, whole, seed):
    """Several workers, interruptions, batches done twice and in any order."""
    random = np.random.default_rng(seed)
    numbers = [*random.permutation(23), *random.integers(0, 23, 9), 99]
    groups = [list(map(int, some)) for some in np.array_split(numbers, random.integers(1, 12))]
    parts = [write(tmp_path / f"{worker}.part", groups[worker::3]) for worker in range(3)]
    with parts[1].open("ab") as file:
        file.write(b"torn")
    out = tmp_path / "out.mscan"
    merge_mscan(parts, out, created=CREATED, numbers=range(23))
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_merged_file_holds_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer, "SEGMENT_SEQUENCES", 3)
    part = write(tmp_path / "a.part", [[3, 1], [2, 7, 5]])
    merge_mscan([part], tmp_path / "out", created=CREATED)
    scan, numbers = read_mscan(tmp_path / "out"), [1, 2, 3, 5, 7]
    assert scan.header.encoding == "log16"
    assert [sequence.number for sequence in scan.sequences] == numbers
    assert [len(segment.sequences) for segment in scan.segments] == [3, 2]
    for name, array in (("activation", scan.activation()), ("gradient", scan.gradient())):
        assert np.allclose(array, getattr(record(numbers), ARRAYS[name]), rtol=1e-4, atol=0)


def test_segments_are_limited_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer, "SEGMENT_BYTES", 1000)
    sizes = []
    for groups in ([range(23)], [[n] for n in range(23)], [range(7), range(7, 23)]):
        part = write(tmp_path / f"{len(groups)}.part", groups)
        out = tmp_path / f"{len(groups)}.mscan"
        merge_mscan([part], out, created=CREATED)
        sizes.append([len(segment.sequences) for segment in read_mscan(out).segments])
    assert sizes[0] == sizes[1] == sizes[2]
    assert 3 < len(sizes[0]) < 23


@pytest.mark.parametrize(
    ("names", "numbers", "what"),
    [
        (["a"], range(12), "10 of 12 sequences are in no part: number 1, 3, 4, 5, 6, 7, 8, 9 ..."),
        (["a", "log16", "other"], None, "c.part and a.part differ in model, parameters"),
        ([], None, "no .mscan file to merge"),
    ],
)
def test_what_cannot_be_merged_is_refused(tmp_path, names, numbers, what):
    renamed = [replace(PARAMETERS[0], name="x"), *PARAMETERS[1:]]
    parts = {
        "a": write(tmp_path / "a.part", [[0, 2]]),
        "log16": write(tmp_path / "b.part", [[1]], encoding="log16"),
        "other": write(tmp_path / "c.part", [[1]], model="other", parameters=renamed),
    }
    out = tmp_path / "out"
    with pytest.raises(ContractError) as error:
        merge_mscan([parts[name] for name in names], out, created=CREATED, numbers=numbers)
    assert error.value.what == what
    assert not out.exists()


def test_merging_overwrites_nothing(whole):
    before = whole.read_bytes()
    with pytest.raises(ContractError):
        merge_mscan([whole], whole, created=CREATED)
    assert whole.read_bytes() == before
