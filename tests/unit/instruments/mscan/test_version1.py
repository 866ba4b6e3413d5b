"""Files of version 1, made from the documented layout and with the faults its writer had."""

import json
import struct

import numpy as np
import pytest

from instruments.errors import ContractError
from instruments.mscan.reader import RECORD, read_mscan

NAMES = {"3": "model.layers.0.self_attn.q_proj.weight", "8": "model.layers.1.mlp.up_proj.weight"}
SEQUENCES = [{"sequence_id": 0, "num_tokens": 4, "source": "User: Hello"}, {"sequence_id": 1, "num_tokens": 3}]


def records(count=14):
    made = np.zeros(count, RECORD)
    made["token_idx"] = np.arange(count) // 2
    made["param_id"] = np.where(np.arange(count) % 2, 8, 3)
    made["block_idx"] = np.arange(count) % 5
    made["activation"] = 100 + np.arange(count)
    return made


def header(sequences, stated, **more):
    content = {"model_name": "Qwen/Qwen3-1.7B", "timestamp": "2025-07-01", "id_to_param_name_map": NAMES} | more
    text = json.dumps(content | {"sequences": sequences}, indent=2).encode()
    return struct.pack("<5sHII", b"MSCAN", 1, 15 + len(text), stated) + text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "old.mscan"


def test_a_file_as_documented(path):
    path.write_bytes(header(SEQUENCES, 14) + records().tobytes())
    scan = read_mscan(path)
    assert (scan.version, scan.scale, scan.lost) == (1, None, 0)
    assert (scan.model, scan.created) == ("Qwen/Qwen3-1.7B", "2025-07-01")
    assert scan.parameters == {int(number): name for number, name in NAMES.items()}
    assert [(s.number, s.tokens, s.source) for s in scan.sequences] == [(0, 4, "User: Hello"), (1, 3, "")]
    assert np.array_equal(scan.records, records())
    assert not scan.records.flags.owndata


def test_no_records(path):
    path.write_bytes(header([], 0))
    assert len(read_mscan(path).records) == 0


@pytest.mark.parametrize("text", ["", "x", "abcdefg"])
def test_a_header_written_over_the_first_records(path, text):
    """The old writer began with a header without sequences and wrote the longer one over it on closing."""
    content = bytearray(header([], 0) + records().tobytes())
    slot = len(content) - records().nbytes
    final = header([SEQUENCES[1] | {"source": text}], 14)
    content[: len(final)] = final
    path.write_bytes(content)
    scan = read_mscan(path)
    lost = -(-(len(final) - slot) // 12)
    assert scan.lost == lost > 0
    assert np.array_equal(scan.records, records()[lost:])


@pytest.mark.parametrize("cut", [1, 12, 31])
def test_a_file_cut_short(path, cut):
    path.write_bytes((header(SEQUENCES, 14) + records().tobytes())[:-cut])
    scan = read_mscan(path)
    assert scan.lost == -(-cut // 12)
    assert np.array_equal(scan.records, records()[: -scan.lost])


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (header([], 0)[:9], "truncated at 9 bytes, in the first 15"),
        (header([], 0)[:40], "truncated at 40 bytes, in a header of 229, or its length is wrong"),
        (
            header([], 0)[:15] + b"#" + header([], 0)[16:],
            "unreadable header (JSONDecodeError: Expecting value: line 1 column 1 (char 0))",
        ),
    ],
)
def test_damage_is_said(path, content, detail):
    path.write_bytes(content)
    with pytest.raises(ContractError) as error:
        read_mscan(path)
    assert (
        str(error.value)
        == f"old.mscan is damaged: {detail}\n  where: {path}\n  do:    copy the file again, or scan again"
    )


def test_it_is_neither_continued_nor_merged(path, tmp_path):
    from unit.instruments.mscan.recordings import PARAMETERS, WIDTH

    from instruments.mscan.merge import merge_mscan
    from instruments.mscan.writer import MscanWriter

    path.write_bytes(header(SEQUENCES, 14) + records().tobytes())
    with pytest.raises(ContractError) as error:
        MscanWriter(path, PARAMETERS, model="pico", block_width=WIDTH, append=True)
    assert str(error.value) == (
        f"old.mscan is of .mscan version 1, which cannot be continued\n  where: {path}\n  do:    write to another file"
    )
    with pytest.raises(ContractError) as error:
        merge_mscan([path], tmp_path / "out", created="now")
    assert str(error.value) == (
        f"old.mscan is of .mscan version 1, which cannot be merged\n  where: {path}\n  do:    leave it out"
    )
