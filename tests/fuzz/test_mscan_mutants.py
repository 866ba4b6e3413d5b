"""Mutated .mscan files are read as they were written, refused with a message, or reported as incomplete."""

import json
import struct
from random import Random
from zlib import crc32

import numpy as np
import pytest
from fuzz.mutants import Trials, mutate_bytes, mutate_json
from unit.instruments.parameter_scan.recordings import PARAMETERS, WIDTH, record

from instruments.parameter_scan.command import summarise
from instruments.parameter_scan.file_format import PREAMBLE, SEGMENT_HEADER, VERSION
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.writer import MscanWriter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # arithmetic on values that no scan produces
COUNTS = [pytest.param(150, id="quick"), pytest.param(3_000, id="long", marks=pytest.mark.slow)]


def write(path, encoding):
    with MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, encoding=encoding) as writer:
        for numbers in ([0, 1], [2, 3], [4]):
            writer.add(record(numbers))
            writer.seal()
    return path.read_bytes()


def look_at_everything(path):
    """Read all arrays and the command's summary; returns (sequences, activations), and whether the file is complete."""
    scan = read_mscan(path)
    summarise(scan)
    for name in scan.parameters.names:
        scan.input_blocks(name)
        scan.output_blocks(name)
    return (scan.sequences, scan.activation()), scan.closed


def with_header(data, content):
    """The file with another header and a checksum that matches."""
    length = PREAMBLE.unpack_from(data)[3]
    text = json.dumps(content).encode()
    text += b" " * (-(PREAMBLE.size + len(text)) % 8)
    start = PREAMBLE.pack(b"MSCAN", VERSION, 0, len(text), 0)[:-4]
    return start + crc32(text, crc32(start)).to_bytes(4, "little") + text + data[PREAMBLE.size + length :]


def with_segment(data, at, fields=None, table=None):
    """The file with another header or sequence table of the segment at byte `at`, and checksums that match."""
    _magic, kind, zero, index, sequences, tokens, length, _checksum, _own = SEGMENT_HEADER.unpack_from(data, at)
    payload = data[at + SEGMENT_HEADER.size : at + SEGMENT_HEADER.size + length]
    if table is not None:
        (old,) = struct.unpack_from("<Q", payload)
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        payload = struct.pack("<Q", len(text)) + text + payload[8 + old :]
    values = [kind, zero, index, sequences, tokens, len(payload)]
    for place, value in fields or ():
        values[place] = value
    start = SEGMENT_HEADER.pack(b"MSEG", *values, crc32(payload), 0)[:-4]
    return data[:at] + start + crc32(start).to_bytes(4, "little") + payload + data[at + SEGMENT_HEADER.size + length :]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("encoding", ["f32", "log16"])
def test_damaged_bytes(tmp_path, encoding, count):
    random, trials, path = Random(1), Trials(), tmp_path / "scan.mscan"
    data = write(path, encoding)
    (sequences, activation), whole = look_at_everything(path)
    assert whole
    for _ in range(count):
        mutant = mutate_bytes(random, data)
        path.write_bytes(mutant)
        found = trials.run(lambda: look_at_everything(path))
        if found is not None and found[1] and mutant != data:  # a complete file must hold the original values
            same = found[0][0] == sequences and np.array_equal(found[0][1], activation)
            trials.failures["lost without a word"] += not same
    assert not +trials.failures, trials


@pytest.mark.parametrize("count", COUNTS)
def test_foreign_json_under_matching_checksums(tmp_path, count):
    random, trials, path = Random(2), Trials(), tmp_path / "scan.mscan"
    data = write(path, "log16")
    length = PREAMBLE.unpack_from(data)[3]
    header = json.loads(data[PREAMBLE.size : PREAMBLE.size + length])
    at = data.index(b"MSEG")
    (size,) = struct.unpack_from("<Q", data, at + SEGMENT_HEADER.size)
    table = json.loads(data[at + SEGMENT_HEADER.size + 8 : at + SEGMENT_HEADER.size + 8 + size])
    for _ in range(count):
        kind = random.randrange(3)
        if kind == 0:
            mutant = with_header(data, mutate_json(random, header))
        elif kind == 1:
            mutant = with_segment(data, at, table=mutate_json(random, table))
        else:
            places = random.sample([0, 2, 3, 4, 5], random.randint(1, 2))
            values = [0, 1, 2, 3, 7, 255, 2**16 - 1]
            mutant = with_segment(data, at, fields=[(place, random.choice(values)) for place in places])
        path.write_bytes(mutant)
        trials.run(lambda: look_at_everything(path))
    assert not +trials.failures, trials
