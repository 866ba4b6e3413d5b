"""Guarantees of .mscan files: exact round trips; torn or damaged data is never read, however the writer ended."""

import errno
import json
import re
import resource
import struct
import sys
import time
from dataclasses import replace
from itertools import pairwise
from zlib import crc32

import numpy as np
import pytest
import torch
from integration.forked import start
from unit.instruments.parameter_scan.recordings import ARRAYS, PARAMETERS, WIDTH, P, record, sequences

from instruments.errors import ContractError
from instruments.parameter_scan import writer as segment_file
from instruments.parameter_scan.file_format import PREAMBLE, SEGMENT_HEADER, ScannedSequence
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.writer import MscanWriter

SIZES = [3, 1, 5, 2]  # sequences a record


def write(path, sizes=SIZES, *, parameters=PARAMETERS, model="pico", width=WIDTH, **settings):
    """Write records of the given sizes with consecutive sequence numbers; return them."""
    settings = {"encoding": "f32", "created": "2026-01-02T03:04:05+00:00"} | settings
    ends = np.cumsum([0, *sizes])
    records = [record(range(a, b)) for a, b in pairwise(ends)]
    with MscanWriter(path, parameters, model=model, block_width=width, **settings) as writer:
        for part in records:
            writer.add(part)
    return records


def a_writer(path, parameters=PARAMETERS, **settings):
    return MscanWriter(path, parameters, **({"model": "pico", "block_width": WIDTH} | settings))


def read_arrays(scan):
    names = scan.parameters.names
    blocks = [scan.input_blocks(name) for name in names]
    return {
        "activation": scan.activation(),
        "gradient": scan.gradient(),
        "in_activation": np.concatenate([activation for activation, _ in blocks], axis=1),
        "in_gradient": np.concatenate([gradient for _, gradient in blocks], axis=1),
        "out_gradient": np.concatenate([scan.output_blocks(name) for name in names], axis=1),
    }


def edit(path, offset, new):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


def segment_starts(path):
    return [match.start() for match in re.finditer(b"MSEG", path.read_bytes())]


def refusal(path):
    """What happened, and where, if the file is refused."""
    with pytest.raises(ContractError) as error:
        read_mscan(path)
    return error.value.what, error.value.where


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_file, "SEGMENT_SEQUENCES", 4)
    return tmp_path / "scan.mscan"


@pytest.mark.parametrize("encoding", ["f32", "log16"])
def test_reading_returns_what_was_written(path, encoding):
    records = write(path, encoding=encoding, metadata={"data": "text", "tokens": 31})
    scan = read_mscan(path)
    assert (scan.torn, scan.end, scan.closed) == (0, path.stat().st_size - SEGMENT_HEADER.size, True)
    assert (scan.header.model, scan.header.created) == ("pico", "2026-01-02T03:04:05+00:00")
    assert scan.header.encoding == encoding
    assert scan.header.metadata == {"data": "text", "tokens": 31}
    assert scan.parameters.block_width == WIDTH
    for stored, watched in zip(scan.parameters.entries, PARAMETERS, strict=True):
        for field in ("name", "kind", "in_features", "out_features"):
            assert getattr(stored, field) == getattr(watched, field)
    assert [sequence.number for sequence in scan.sequences] == list(range(sum(SIZES)))
    for stored, scanned in zip(scan.sequences, sequences(range(sum(SIZES))), strict=True):
        assert (stored.name, stored.tokens, stored.source) == (scanned.name, scanned.tokens, scanned.source)
    assert [len(segment.sequences) for segment in scan.segments] == [4, 4, 3]
    for name, found in read_arrays(scan).items():
        written = torch.cat([getattr(part, ARRAYS[name]) for part in records]).numpy()
        assert found.shape == written.shape
        assert (np.abs(found.astype(np.float64) / written - 1) <= 6e-5).all()
        assert (encoding == "f32") == np.array_equal(found, written)


def test_a_file_without_sequences(path):
    write(path, [])
    scan = read_mscan(path)
    assert (scan.sequences, scan.torn, scan.closed) == ([], 0, True)
    assert scan.activation().shape == (0, P)
    assert scan.output_blocks(PARAMETERS[1].name).shape == (0, 2)


def test_norms_stored_in_full_are_views_of_the_file(path):
    write(path)
    first = read_mscan(path).segments[0]
    assert not first.array("activation").flags.owndata
    assert not first.array("in_gradient", columns=slice(3, 9)).flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        first.array("activation")[0, 0] = 1


def test_every_array_is_aligned(path):
    write(path, [3, 4], encoding="log16")
    assert all(start % 8 == 0 for start in segment_starts(path))
    for segment in read_mscan(path).segments:
        for name in ARRAYS:
            assert segment.scale(name).ctypes.data % 8 == 0


def test_sequence_numbers_continue_unless_given(path):
    with a_writer(str(path)) as writer:
        writer.add(record([0, 1]))
        writer.add(record([7, 5]), numbers=[7, 5])
        writer.add(record([8]))
        writer.add(record([]))
    with a_writer(path, append=True) as writer:
        writer.add(record([9]))
    assert [sequence.number for sequence in read_mscan(str(path)).sequences] == [0, 1, 7, 5, 8, 9]


def test_the_writer_copies_the_scanners_buffers(path):
    kept, given = record([0]), record([0])
    with a_writer(path, encoding="f32") as writer:
        writer.add(given)
        given.activation_BP.fill_(99)
    assert np.array_equal(read_mscan(path).activation(), kept.activation_BP.numpy())


def test_a_cut_anywhere_in_the_last_segment_is_a_torn_tail(path):
    write(path, encoding="log16")
    whole = path.read_bytes()
    last, closing = segment_starts(path)[-2:]
    for length in sorted({*range(last, closing, 13), *range(last, last + 50), closing - 1}):
        path.write_bytes(whole[:length])
        scan = read_mscan(path)
        assert (len(scan.sequences), scan.end, scan.torn, scan.closed) == (8, last, length - last, False)
        assert scan.activation().shape == (8, P)
    # The payload is complete; its header still holds zeros.
    path.write_bytes(whole[:closing])
    edit(path, last, bytes(SEGMENT_HEADER.size))
    scan = read_mscan(path)
    assert (len(scan.sequences), scan.torn) == (8, closing - last)


def test_a_file_without_its_closing_header_is_not_closed(path):
    write(path)
    whole = path.read_bytes()
    end = len(whole) - SEGMENT_HEADER.size
    for at in range(end, len(whole)):
        path.write_bytes(whole[:at])
        scan = read_mscan(path)
        assert (len(scan.sequences), scan.torn, scan.closed) == (11, at - end, False)
        path.write_bytes(whole)
        edit(path, at, bytes([whole[at] ^ 1]))
        assert not read_mscan(path).closed
    path.write_bytes(whole + b"more")
    assert not read_mscan(path).closed


def test_a_closing_header_with_other_counts_is_damaged(path):
    write(path)
    closing = segment_starts(path)[-1]
    start = struct.pack("<4sHHIIQQI", b"MSEG", 2, 0, 3, 12, 31, 0, 0)
    edit(path, closing, start + struct.pack("<I", crc32(start)))
    tokens = sum(sequence.tokens for sequence in sequences(range(11)))
    assert refusal(path) == (
        f"scan.mscan is damaged: 11 sequences of {tokens} tokens are there, its closing header says 12 of 31",
        f"{path}, bytes {closing} to {closing + 40}",
    )


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([], "not an object"),
        ({"model": 3, "metadata": []}, "model, metadata"),
        ({"encoding": "f16"}, "encoding"),
        ({"block_width": 0}, "block_width"),
        ({"per_token": True}, "per_token"),
        ({"parameters": [["a", "linear", 4, 4]]}, "parameter"),
        ({"parameters": [["a", "conv", 4, 4, None, None]]}, "parameter"),
        ({"parameters": [["a", "linear", 4, 4, None, 0]]}, "parameter"),
        ({"parameters": [["a", "linear", True, 4, None, None]]}, "parameter"),
        ({"parameters": [["a", "linear", 2**31, 2**31, None, 64]]}, "blocks"),
    ],
)
def test_an_invalid_header_with_a_right_checksum_is_refused(path, content, field):
    write(path, [])
    data = path.read_bytes()
    end = 16 + struct.unpack("<I", data[8:12])[0]
    text = json.dumps(json.loads(data[16:end]) | content if content else content).encode()
    start = PREAMBLE.pack(b"MSCAN", 3, 0, len(text), 0)[:-4]
    path.write_bytes(start + crc32(text, crc32(start)).to_bytes(4, "little") + text)
    what, where = refusal(path)
    assert what.startswith("scan.mscan is damaged: the header is invalid: ")
    assert field in what
    assert where == str(path)


def test_names_that_are_not_utf_8_are_escaped(path):
    """Python reads the byte E9 of a file's name as a surrogate, which no reader could encode."""
    with a_writer(path, model="/models/\udce9") as writer:
        writer.add(replace(record([0]), sequences=[ScannedSequence("caf\udce9.txt", 3, "/data/\udce9")]))
    scan = read_mscan(path)
    assert (scan.header.model, scan.sequences[0].name) == ("/models/\\udce9", "caf\\udce9.txt")
    assert scan.sequences[0].source == "/data/\\udce9"


def test_a_file_that_cannot_be_created_leaves_none(path):
    with pytest.raises(TypeError):
        a_writer(path, metadata={"folder": path})
    assert not path.exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            a_writer(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


def test_appending_removes_a_torn_tail_with_a_warning(path, caplog):
    write(path, [4])
    sealed = path.read_bytes()
    path.write_bytes(sealed + b"MSEG torn")
    with a_writer(path, encoding="f32", append=True) as writer:
        writer.add(record([4, 5]))
    assert caplog.messages == [f"{path}: cut off a torn tail of 49 bytes"]
    assert path.read_bytes()[: len(sealed) - SEGMENT_HEADER.size] == sealed[: -SEGMENT_HEADER.size]
    scan = read_mscan(path)
    assert [sequence.number for sequence in scan.sequences] == [0, 1, 2, 3, 4, 5]
    assert scan.torn == 0


def test_an_appended_file_equals_one_written_at_once(path, tmp_path):
    write(path, [4, 4])
    other = tmp_path / "other.mscan"
    write(other, [4], metadata={})
    with a_writer(other, encoding="f32", append=True) as writer:
        writer.add(record([4, 5, 6, 7]))
    assert other.read_bytes() == path.read_bytes()


def write_until_killed(path):
    writer = a_writer(path, append=True)
    for number in range(10_000):
        writer.add(record([number]))
        sys.stdout.write(f"{number}\n")


def test_a_killed_writer_loses_the_unsealed_segment_at_most(path):
    said = path.with_name("said")
    said.touch()
    process = start(path, said, work=write_until_killed)
    while "\n40\n" not in said.read_text():
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    added = len(said.read_text().split())
    scan = read_mscan(path)
    kept = [sequence.number for sequence in scan.sequences]
    assert kept == list(range(len(kept)))
    assert len(kept) % 4 == 0
    assert len(kept) >= added - 3
    assert np.allclose(scan.activation()[-1], record([kept[-1]]).activation_BP[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read scan.mscan: No such file or directory"),
        (b"PAR1 and so on", "scan.mscan is no .mscan file: it begins with b'PAR1 ', not b'MSCAN'"),
        (b"", "scan.mscan is damaged: truncated at 0 bytes, in the first 16"),
        (b"MSC", "scan.mscan is damaged: truncated at 3 bytes, in the first 16"),
    ],
)
def test_what_is_not_an_mscan_file_is_refused(path, content, what):
    if content is not None:
        path.write_bytes(content)
    assert refusal(path) == (what, str(path))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version_is_refused(path, version):
    write(path)
    edit(path, 5, struct.pack("<H", version))
    assert refusal(path)[0] == f"scan.mscan is of .mscan version {version}; 3 is known here"


@pytest.mark.parametrize("segment", [0, 1, 2])
@pytest.mark.parametrize(("offset", "part"), [(4, "its header"), (500, "its payload")])
def test_the_error_names_the_damaged_segment(path, segment, offset, part):
    write(path)
    edit(path, segment_starts(path)[segment] + offset, b"\xff")
    what, where = refusal(path)
    assert what == f"scan.mscan is damaged: the checksum of segment {segment} does not match"
    assert where.startswith(f"{path}, {part}, bytes ")


def test_unverified_reading_still_checks_headers(path):
    write(path)
    edit(path, segment_starts(path)[1] + 500, b"\xff")
    assert len(read_mscan(path, verify=False).sequences) == 11


def test_an_existing_file_is_not_overwritten(path):
    write(path, [2])
    before = path.read_bytes()
    with pytest.raises(ContractError, match=r"^scan\.mscan is there already"):
        write(path, [1])
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"model": "other"}, "model"),
        ({"encoding": "log16"}, "encoding"),
        ({"width": 5}, "block_width"),
        ({"parameters": PARAMETERS[:3], "model": "other"}, "model, parameters"),
        ({"parameters": [*PARAMETERS[:3], replace(PARAMETERS[3], out_features=8)]}, "parameters"),
    ],
)
def test_appending_with_another_header_is_refused(path, settings, what):
    write(path)
    with pytest.raises(ContractError, match=f"^scan.mscan was written with another {what}\n"):
        write(path, append=True, **settings)


def test_a_second_writer_is_refused(path):
    with a_writer(path), pytest.raises(ContractError, match=r"^another process is writing"):
        a_writer(path, append=True)


def test_a_file_system_without_locks_holds_it_too(path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("instruments.parameter_scan.writer.flock", flock)
    write(path)
    with pytest.raises(ContractError, match=r"^scan\.mscan is there already"):
        write(path)


def a_record_with(value):
    wrong = record([0, 1])
    wrong.in_gradient_BI[1, 2] = value
    return wrong


@pytest.mark.parametrize(
    ("settings", "wrong", "what"),
    [
        ({}, a_record_with(-1.0), r"in_gradient holds a negative or infinite value"),
        ({}, a_record_with(torch.inf), r"in_gradient holds a negative or infinite value"),
        ({"parameters": PARAMETERS[:3]}, record([0, 1]), r"activation is \[2, 4\]; the tables say \[2, 3\]"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(path, settings, wrong, what):
    with a_writer(path, **settings) as writer, pytest.raises(ContractError, match=what):
        writer.add(wrong)
    assert read_mscan(path).sequences == []


def test_written_bytes_follow_the_specification(path):
    """Parse preamble and segment headers without the reader."""
    write(path, [2])
    content = path.read_bytes()
    magic, version, flags, length, checksum = struct.unpack("<5sHBII", content[:16])
    assert (magic, version, flags, PREAMBLE.size) == (b"MSCAN", 3, 0, 16)
    assert checksum == crc32(content[:12] + content[16 : 16 + length])
    segment = content[16 + length :]
    magic, kind, zero, index, count, tokens, size, payload_checksum, checksum = struct.unpack(
        "<4sHHIIQQII", segment[:40]
    )
    assert (magic, kind, zero, index, count, tokens) == (b"MSEG", 1, 0, 0, 2, 2 + 3)
    assert checksum == crc32(segment[:36])
    assert payload_checksum == crc32(segment[40 : 40 + size])
    closing = segment[40 + size :]
    assert struct.unpack("<4sHHIIQQI", closing[:36]) == (b"MSEG", 2, 0, 1, 2, 2 + 3, 0, 0)
    assert closing[36:] == crc32(closing[:36]).to_bytes(4, "little")
    (table,) = struct.unpack("<Q", segment[40:48])
    activation = np.frombuffer(segment, "<f4", 2 * P, 48 + table).reshape(2, P)
    assert np.array_equal(activation, record([0, 1]).activation_BP.numpy())


@pytest.mark.parametrize("step", [1, 2])
def test_sealing_can_be_repeated_after_a_full_disk(path, tmp_path, monkeypatch, step):
    """A segment is flushed twice: after its payload and after its header."""
    calls, flush = [], segment_file._sync
    with a_writer(path, created="2026") as writer:
        writer.add(record([0, 1]))
        writer.seal()
        writer.add(record([2, 3, 4]))

        def full(file):
            calls.append(file)
            if len(calls) == step:
                raise OSError(28, "No space left on device")
            flush(file)

        monkeypatch.setattr(segment_file, "_sync", full)
        with pytest.raises(OSError, match="No space left"):
            writer.seal()
    again = tmp_path / "again.mscan"
    with a_writer(again, created="2026") as writer:
        writer.add(record([0, 1]))
        writer.seal()
        writer.add(record([2, 3, 4]))
    assert path.read_bytes() == again.read_bytes()
