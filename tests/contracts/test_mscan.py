"""Guarantees of .mscan files: exact round trips; torn or damaged data is never read, however the writer ended."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from unit.instruments.parameter_scan.recordings import ARRAYS, PARAMETERS, WIDTH, P, record, sequences

from instruments.errors import ContractError
from instruments.parameter_scan import writer as segment_file
from instruments.parameter_scan.header import PREAMBLE
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.segments import HEADER
from instruments.parameter_scan.writer import MscanWriter

REPOSITORY = Path(__file__).parents[2]
SIZES = [3, 1, 5, 2]  # sequences a record


def write(path, sizes=SIZES, *, parameters=PARAMETERS, model="pico", width=WIDTH, per_token=False, **settings):
    """Write records of the given sizes with consecutive sequence numbers; return them."""
    settings = {"encoding": "f32", "segment_sequences": 4, "created": "2026-01-02T03:04:05+00:00"} | settings
    ends = np.cumsum([0, *sizes])
    records = [record(range(a, b), per_token=per_token) for a, b in pairwise(ends)]
    with MscanWriter(path, parameters, model=model, block_width=width, per_token=per_token, **settings) as writer:
        for part in records:
            writer.add(part)
    return records


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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "scan.mscan"


@pytest.mark.parametrize("encoding", ["f32", "log16"])
def test_everything_comes_back(path, encoding):
    records = write(path, encoding=encoding, metadata={"data": "text", "tokens": 31})
    scan = read_mscan(path)
    assert (scan.torn, scan.end, scan.closed) == (0, path.stat().st_size - HEADER.size, True)
    assert (scan.header.model, scan.header.created) == ("pico", "2026-01-02T03:04:05+00:00")
    assert (scan.header.encoding, scan.header.per_token) == (encoding, False)
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
        bound = scan.error_bound(name)
        assert found.shape == written.shape
        assert (np.abs(found.astype(np.float64) / written - 1) <= bound + 1e-7).all()
        assert (encoding == "f32") == (bound == 0).all() == np.array_equal(found, written)


@pytest.mark.parametrize("encoding", ["f32", "log16"])
def test_tokens_come_back_by_sequence(path, encoding):
    records = write(path, encoding=encoding, per_token=True)
    scan = read_mscan(path)
    for part in records:
        for row, sequence in enumerate(part.sequences):
            activation, gradient = scan.tokens(sequence.name)
            assert activation.shape == (sequence.tokens, P)
            assert np.allclose(activation, part.token_activation[row], rtol=1e-4, atol=0)
            assert np.allclose(gradient, part.token_gradient[row], rtol=1e-4, atol=0)
    for number in (0, 10):
        assert np.array_equal(scan.tokens(number)[0], scan.tokens(f"text {number}")[0])


@pytest.mark.parametrize("encoding", ["f32", "log16"])
def test_what_was_not_measured_is_not_a_number(path, encoding):
    forward_only = record([0, 1])
    for name in ("gradient_BP", "in_gradient_BI", "out_gradient_BO"):
        getattr(forward_only, name).fill_(torch.nan)
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, encoding=encoding) as writer:
        writer.add(forward_only)
    scan = read_mscan(path)
    assert np.isnan(scan.gradient()).all()
    assert not np.isnan(scan.activation()).any()


def test_a_file_without_sequences(path):
    write(path, [])
    scan = read_mscan(path)
    assert (scan.sequences, scan.torn, scan.closed) == ([], 0, True)
    assert scan.activation().shape == (0, P)
    assert scan.output_blocks(PARAMETERS[1].name).shape == (0, 2)


def test_a_file_may_be_named_by_a_text(path):
    with MscanWriter(str(path), PARAMETERS, model="pico", block_width=WIDTH) as file:
        file.add(record(range(3)))
    assert len(read_mscan(str(path)).sequences) == 3


def test_norms_stored_in_full_are_views_of_the_file(path):
    write(path)
    first = read_mscan(path).segments[0]
    assert not first.array("activation").flags.owndata
    assert not first.array("in_gradient", columns=slice(3, 9)).flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        first.array("activation")[0, 0] = 1


def test_every_array_is_aligned(path):
    write(path, [3, 4], encoding="log16", per_token=True, segment_sequences=3)
    assert all(start % 8 == 0 for start in segment_starts(path))
    for segment in read_mscan(path).segments:
        for name in ARRAYS:
            assert segment.scale(name).ctypes.data % 8 == 0


def test_numbers_are_counted_on_unless_given(path):
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH) as writer:
        writer.add(record([0, 1]))
        writer.add(record([7, 5]), numbers=[7, 5])
        writer.add(record([8]))
        writer.add(record([]))
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, append=True) as writer:
        writer.add(record([9]))
    assert [sequence.number for sequence in read_mscan(path).sequences] == [0, 1, 7, 5, 8, 9]


def test_the_writer_keeps_no_hold_of_the_scanners_buffers(path):
    kept, given = record([0]), record([0])
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, encoding="f32") as writer:
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


def test_a_cut_or_damage_in_the_closing_header_is_said(path):
    write(path)
    whole = path.read_bytes()
    for length in range(len(whole) - HEADER.size, len(whole)):
        path.write_bytes(whole[:length])
        scan = read_mscan(path)
        assert (len(scan.sequences), scan.torn, scan.closed) == (11, length - len(whole) + HEADER.size, False)
    for at in range(len(whole) - HEADER.size, len(whole)):
        path.write_bytes(whole)
        edit(path, at, bytes([whole[at] ^ 1]))
        assert not read_mscan(path).closed
    path.write_bytes(whole + b"more")
    assert not read_mscan(path).closed


def test_a_closing_header_that_counts_other_sequences(path):
    write(path)
    closing = segment_starts(path)[-1]
    start = struct.pack("<4sHHIIQQI", b"MSEG", 2, 0, 3, 12, 31, 0, 0)
    edit(path, closing, start + struct.pack("<I", crc32(start)))
    with pytest.raises(ContractError) as error:
        read_mscan(path)
    tokens = sum(sequence.tokens for sequence in sequences(range(11)))
    assert str(error.value) == (
        f"scan.mscan is damaged: 11 sequences of {tokens} tokens are there, its closing header says 12 of 31\n"
        f"  where: {path}, bytes {closing} to {closing + 40}\n  do:    copy the file again, or scan again"
    )


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ([], "it is not an object"),
        ({"model": 3, "metadata": []}, "model, metadata missing or of another type"),
        ({"encoding": "f16"}, "encoding is none of f32, log16"),
        ({"block_width": 0}, "block_width is not between 1 and 2147483648"),
        (
            {"parameters": [["a", "linear", 4, 4]]},
            "a parameter is not [name, kind, in_features, out_features, in_head, out_head]",
        ),
        ({"parameters": [["a", "conv", 4, 4, None, None]]}, "parameter a is conv of 4 to 4 features"),
        ({"parameters": [["a", "linear", 4, 4, None, 0]]}, "parameter a has heads [None, 0] wide"),
        ({"parameters": [["a", "linear", 2**31, 2**31, None, 64]]}, "its parameters have more than 16777216 blocks"),
    ],
)
def test_a_header_that_no_scanner_writes(path, content, detail):
    write(path, [])
    data = path.read_bytes()
    end = 16 + struct.unpack("<I", data[8:12])[0]
    text = json.dumps(json.loads(data[16:end]) | content if content else content).encode()
    start = PREAMBLE.pack(b"MSCAN", 3, 0, len(text), 0)[:-4]
    path.write_bytes(start + crc32(text, crc32(start)).to_bytes(4, "little") + text)
    with pytest.raises(ContractError) as error:
        read_mscan(path)
    assert str(error.value) == (
        f"scan.mscan is damaged: the header is invalid: {detail}\n"
        f"  where: {path}\n  do:    copy the file again, or scan again"
    )


def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(ContractError, match=r"scan\.mscan is no regular file"):
        read_mscan(path)


def test_an_unsealed_segment_is_a_torn_tail(path):
    """The payload is complete; the header still holds zeros."""
    write(path)
    last, closing = segment_starts(path)[-2:]
    edit(path, last, bytes(HEADER.size))
    os.truncate(path, closing)
    scan = read_mscan(path)
    assert (len(scan.sequences), scan.torn) == (8, path.stat().st_size - last)


def test_appending_cuts_a_torn_tail_off_and_says_so(path):
    write(path, [4])
    sealed = path.read_bytes()
    path.write_bytes(sealed + b"MSEG torn")
    with (
        pytest.warns(UserWarning, match=re.escape(f"{path}: cut off a torn tail of 49 bytes")),
        MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, encoding="f32", append=True) as writer,
    ):
        writer.add(record([4, 5]))
    assert path.read_bytes()[: len(sealed) - HEADER.size] == sealed[: -HEADER.size]
    scan = read_mscan(path)
    assert [sequence.number for sequence in scan.sequences] == [0, 1, 2, 3, 4, 5]
    assert scan.torn == 0


def test_appending_goes_on_as_if_there_had_been_no_pause(path, tmp_path):
    write(path, [4, 4])
    other = tmp_path / "other.mscan"
    write(other, [4], metadata={})
    with MscanWriter(other, PARAMETERS, model="pico", block_width=WIDTH, encoding="f32", append=True) as writer:
        writer.add(record([4, 5, 6, 7]))
    assert other.read_bytes() == path.read_bytes()


KILLED = """
import os, signal, sys
from pathlib import Path
from unit.instruments.parameter_scan.recordings import PARAMETERS, WIDTH, record
from instruments.parameter_scan.writer import MscanWriter

path = Path(sys.argv[1])
writer = MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, segment_sequences=3, append=True)
for number in range(10_000):
    writer.add(record([number]))
    print(number, flush=True)
"""


def test_a_killed_writer_loses_the_unsealed_segment_at_most(path):
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-c", KILLED, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line == "40\n":
                break
        os.kill(process.pid, signal.SIGKILL)
        added = 41 + len(process.stdout.read().split())
    scan = read_mscan(path)
    kept = [sequence.number for sequence in scan.sequences]
    assert kept == list(range(len(kept)))
    assert len(kept) % 3 == 0
    assert len(kept) >= added - 2
    assert np.allclose(scan.activation()[-1], record([kept[-1]]).activation_BP[0], rtol=1e-3)


def test_after_an_error_what_was_added_is_kept(path):
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH) as writer,
    ):
        writer.add(record([0, 1]))
        raise KeyboardInterrupt
    assert len(read_mscan(path).sequences) == 2


def message(path):
    with pytest.raises(ContractError) as error:
        read_mscan(path)
    return str(error.value)


def test_a_missing_file(path):
    assert message(path) == (
        f"cannot read scan.mscan: No such file or directory\n  where: {path}\n"
        "  do:    name a file that the scanner wrote"
    )


def test_another_kind_of_file(path):
    path.write_bytes(b"PAR1 and so on")
    assert message(path) == (
        f"scan.mscan is no .mscan file: it begins with b'PAR1 ', not b'MSCAN'\n  where: {path}\n"
        "  do:    name a file that the scanner wrote"
    )


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version(path, version):
    write(path)
    edit(path, 5, struct.pack("<H", version))
    assert message(path) == (
        f"scan.mscan is of .mscan version {version}; 3 is known here\n  where: {path}\n"
        "  do:    read it with the release that wrote it, or scan again"
    )


@pytest.mark.parametrize("length", [0, 1, 6])
def test_truncated_before_the_version(path, length):
    write(path)
    path.write_bytes(path.read_bytes()[:length])
    assert message(path) == (
        f"scan.mscan is damaged: truncated at {length} bytes, in the first 7\n  where: {path}\n"
        "  do:    copy the file again, or scan again"
    )


@pytest.mark.parametrize("length", [7, 15])
def test_truncated_in_the_preamble(path, length):
    write(path)
    path.write_bytes(path.read_bytes()[:length])
    assert message(path) == (
        f"scan.mscan is damaged: truncated at {length} bytes, in the first 16\n  where: {path}\n"
        "  do:    copy the file again, or scan again"
    )


def test_truncated_in_the_header(path):
    write(path)
    start = segment_starts(path)[0]
    path.write_bytes(path.read_bytes()[:100])
    assert message(path) == (
        f"scan.mscan is damaged: truncated at 100 bytes, in a header of {start}, or its length is wrong\n"
        f"  where: {path}\n  do:    copy the file again, or scan again"
    )


@pytest.mark.parametrize("offset", [7, 12, 16, 60])
def test_a_damaged_header(path, offset):
    write(path)
    start = segment_starts(path)[0]
    edit(path, offset, bytes([path.read_bytes()[offset] ^ 4]))
    assert message(path) == (
        f"scan.mscan is damaged: checksum of the header (bytes 0 to {start}) does not match\n  where: {path}\n"
        "  do:    copy the file again, or scan again"
    )


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_damaged_payload_is_named(path, segment):
    write(path)
    starts = [*segment_starts(path), path.stat().st_size]
    edit(path, starts[segment] + 500, b"\xff")
    assert message(path) == (
        f"scan.mscan is damaged: the checksum of segment {segment} does not match\n"
        f"  where: {path}, its payload, bytes {starts[segment] + 40} to {starts[segment + 1]}\n"
        "  do:    copy the file again, or scan again"
    )


@pytest.mark.parametrize("offset", range(0, 40, 3))
def test_a_damaged_segment_header_in_the_middle_is_named(path, offset):
    write(path)
    start = segment_starts(path)[1]
    edit(path, start + offset, bytes([path.read_bytes()[start + offset] ^ 1]))
    assert message(path) == (
        "scan.mscan is damaged: the checksum of segment 1 does not match\n"
        f"  where: {path}, its header, bytes {start} to {start + 40}\n"
        "  do:    copy the file again, or scan again"
    )


def test_a_lost_segment_in_the_middle_is_noticed(path):
    write(path)
    starts, content = segment_starts(path), path.read_bytes()
    path.write_bytes(content[: starts[1]] + content[starts[2] :])
    assert "the checksum of segment 1 does not match" in message(path)


def test_unverified_reading_still_checks_headers(path):
    write(path)
    edit(path, segment_starts(path)[1] + 500, b"\xff")
    assert len(read_mscan(path, verify=False).sequences) == 11


def test_a_file_that_is_there_is_not_written_over(path):
    write(path, [2])
    before = path.read_bytes()
    with pytest.raises(ContractError) as error:
        write(path, [1])
    assert str(error.value) == (
        f"scan.mscan is there already\n  where: {path}\n  do:    append=True to go on with it, or another name"
    )
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"model": "other"}, "model"),
        ({"encoding": "log16"}, "encoding"),
        ({"per_token": True}, "per_token"),
        ({"width": 5}, "block_width"),
        ({"parameters": PARAMETERS[:3], "model": "other"}, "model, parameters"),
        ({"parameters": [*PARAMETERS[:3], replace(PARAMETERS[3], out_features=8)]}, "parameters"),
    ],
)
def test_appending_what_does_not_fit_is_refused(path, settings, what):
    write(path)
    with pytest.raises(ContractError) as error:
        write(path, append=True, **settings)
    assert str(error.value) == (
        f"scan.mscan was written with another {what}\n  where: {path}\n"
        "  do:    write to another file, or scan with the settings of this one"
    )


def test_two_writers_at_once(path):
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH):
        with pytest.raises(ContractError) as error:
            MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, append=True)
        assert str(error.value) == (
            f"another process is writing scan.mscan\n  where: {path}\n  do:    wait for it, or write to another file"
        )


def test_a_record_of_another_scanner_is_refused(path):
    with MscanWriter(path, PARAMETERS[:3], model="pico", block_width=WIDTH) as writer:
        with pytest.raises(ContractError) as error:
            writer.add(record([0, 1]))
        assert str(error.value) == (
            f"activation is [2, 4]; the tables say [2, 3]\n  where: {path}\n"
            "  do:    give the writer the parameters and the block width of the scanner that made the record"
        )


@pytest.mark.parametrize("value", [-1.0, torch.inf])
def test_what_is_no_norm_is_refused(path, value):
    wrong = record([0, 1])
    wrong.in_gradient_BI[1, 2] = value
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH) as writer:
        with pytest.raises(ContractError) as error:
            writer.add(wrong)
        assert str(error.value) == (
            "in_gradient holds a negative or infinite value, which is not a norm\n"
            f"  where: {path}, sequences text 0, text 1\n"
            "  do:    scan in a wider number format, such as model.dtype=float32"
        )


def test_tokens_that_were_not_recorded(path):
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, per_token=True) as writer:
        with pytest.raises(ContractError) as error:
            writer.add(record([0]))
        assert str(error.value) == (
            "the record holds no values per token\n  where: MscanWriter(per_token=True)\n  do:    per_token=False"
        )
    write(path.with_name("plain.mscan"))
    with pytest.raises(ContractError) as error:
        read_mscan(path.with_name("plain.mscan")).tokens(0)
    assert str(error.value) == (
        f"plain.mscan holds no values per token\n  where: {path.with_name('plain.mscan')}\n"
        "  do:    scan again with per_token=True"
    )


def test_an_unknown_encoding(path):
    with pytest.raises(ContractError) as error:
        write(path, encoding="log8")
    assert str(error.value) == f"encoding=log8 is none of f32, log16\n  where: {path}\n  do:    encoding=log16"


def test_an_unknown_sequence(path):
    write(path)
    with pytest.raises(ContractError) as error:
        read_mscan(path).select("text 99")
    assert str(error.value) == (
        f"no sequence 'text 99'; there are 11\n  where: {path}\n"
        "  do:    ask for one of them, such as number 0 or name 'text 0'"
    )


def test_the_specification_is_what_is_written(path):
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
def test_a_full_disk_costs_nothing_that_is_tried_again(path, tmp_path, monkeypatch, step):
    """A segment is flushed twice: after its payload and after its header."""
    calls, flush = [], segment_file._sync
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, created="2026") as writer:
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
    with MscanWriter(again, PARAMETERS, model="pico", block_width=WIDTH, created="2026") as writer:
        writer.add(record([0, 1]))
        writer.seal()
        writer.add(record([2, 3, 4]))
    assert path.read_bytes() == again.read_bytes()
