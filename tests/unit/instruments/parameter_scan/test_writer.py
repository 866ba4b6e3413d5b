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
    with MscanWriter(path, **settings, per_token=True) as writer:
        for numbers in groups:
            writer.add(record(numbers, per_token=True), numbers=numbers)
            writer.seal()
    return path


@pytest.fixture
def whole(tmp_path):
    """One worker's scan without interruption, merged."""
    part = write(tmp_path / "whole.part", [range(23)])
    merge_mscan([part], tmp_path / "whole.mscan", created=CREATED, segment_sequences=5)
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
    merge_mscan(parts, out, created=CREATED, numbers=range(23), segment_sequences=5)
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_merged_file_holds_the_parts(whole):
    scan = read_mscan(whole)
    assert [sequence.number for sequence in scan.sequences] == list(range(23))
    assert [len(segment.sequences) for segment in scan.segments] == [5, 5, 5, 5, 3]
    assert scan.header.encoding == "log16"
    expected = record(range(23), per_token=True)
    for name, array in (("activation", scan.activation()), ("gradient", scan.gradient())):
        assert np.allclose(array, getattr(expected, ARRAYS[name]), rtol=1e-4, atol=0)
    for number in (0, 7, 22):
        assert np.allclose(scan.tokens(number)[1], expected.token_gradient[number], rtol=1e-4, atol=0)


def test_merging_without_loss(tmp_path):
    part = write(tmp_path / "a.part", [[3, 1], [2]])
    merge_mscan([part], tmp_path / "out", created=CREATED, encoding="f32")
    scan = read_mscan(tmp_path / "out")
    assert np.array_equal(scan.activation(), record([1, 2, 3]).activation_BP.numpy())


def test_segments_are_limited_in_bytes(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(buffer, "SEGMENT_BYTES", 1000)
    sizes = []
    for groups in ([range(23)], [[n] for n in range(23)], [range(7), range(7, 23)]):
        part = write(tmp_path / f"{len(groups)}.part", groups)
        out = tmp_path / f"{len(groups)}.mscan"
        merge_mscan([part], out, created=CREATED)
        sizes.append([len(segment.sequences) for segment in read_mscan(out).segments])
    assert sizes[0] == sizes[1] == sizes[2]
    assert 3 < len(sizes[0]) < 23


def refusal(*arguments, **settings):
    with pytest.raises(ContractError) as error:
        merge_mscan(*arguments, created=CREATED, **settings)
    return error.value.what, error.value.where


def test_a_missing_number_is_an_error(tmp_path):
    part, out = write(tmp_path / "a.part", [[0, 2]]), tmp_path / "out"
    what = "10 of 12 sequences are in no part: number 1, 3, 4, 5, 6, 7, 8, 9 ..."
    assert refusal([part], out, numbers=range(12)) == (what, str(out))
    assert not out.exists()


def test_parts_of_two_scans_are_not_merged(tmp_path):
    renamed = [replace(PARAMETERS[0], name="x"), *PARAMETERS[1:]]
    parts = [
        write(tmp_path / "a.part", [[0]]),
        write(tmp_path / "b.part", [[1]], encoding="log16"),
        write(tmp_path / "c.part", [[1]], model="other", parameters=renamed),
    ]
    what = "c.part and a.part differ in model, parameters"
    assert refusal(parts, tmp_path / "out") == (what, str(parts[2]))


def test_merging_needs_parts_and_overwrites_nothing(whole):
    assert refusal([], whole) == ("no .mscan file to merge", "merge_mscan")
    assert refusal([whole], whole) == ("whole.mscan is there already", str(whole))
