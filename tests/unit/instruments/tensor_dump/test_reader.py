"""Dumps from elsewhere: rows, manifests and shards are checked before use."""

import json
import os
from contextlib import nullcontext

import pytest
from unit.instruments.tensor_dump.small_model import Small, run

from instruments.errors import ContractError
from instruments.tensor_dump import writer
from instruments.tensor_dump.command import main
from instruments.tensor_dump.reader import DumpReader


@pytest.fixture
def dump(tmp_path):
    run(tmp_path / "dump", steps=1)
    return tmp_path / "dump"


def edit_row(dump, **fields):
    """Change fields in the second line of the index, the first tensor's row; returns the index's path."""
    path = dump / "index-00000.jsonl"
    header, row, *rest = path.read_text().splitlines()
    path.write_text("\n".join([header, json.dumps(json.loads(row) | fields), *rest]) + "\n")
    return path


@pytest.mark.parametrize("field", ["name", "file"])
@pytest.mark.parametrize("value", ["/tmp/x", "..", "", "a\0b", "x" * 241, "..\\x"])
def test_a_name_that_leads_elsewhere_is_refused(dump, field, value, tmp_path, capsys):
    edit_row(dump, **{field: value})
    assert main(["export", str(dump), str(tmp_path / "out")]) == 1
    assert f"line 2: {field} {value!r} " in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dump"]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"shape": [-1]}, "shape"),
        ({"status": "kept"}, "status 'kept'"),
        ({"checksum": None}, "checksum"),
        ({"counter": 1.5, "device": None}, "counter, device"),
        ({"timestamp": "today"}, "'today'"),
        ({"label": "\ud800"}, "label"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_named(dump, fields, detail):
    path = edit_row(dump, **fields)
    with pytest.raises(ContractError, match=f"index-00000.jsonl is damaged: line 2: .*{detail}") as error:
        DumpReader(dump)
    assert error.value.where == str(path)


def test_every_byte_of_a_tensor_is_under_its_checksum(dump):
    (shard,) = dump.glob("*.safetensors")
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), 7):
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        damaged = []
        with DumpReader(dump) as reader:
            for record in reader.select(status="stored"):
                try:
                    reader.load(record)
                except ContractError as error:
                    assert "its bytes do not match the checksum" in str(error)  # noqa: PT017 - one of many tensors
                    damaged.append(record.key)
        assert len(set(damaged)) == 1


def test_a_row_may_not_borrow_another_tensor(dump):
    with DumpReader(dump) as reader:
        first, second = reader.select(tensor="weight")
    rows = [json.loads(line) for line in (dump / "index-00000.jsonl").read_text().splitlines()]
    place = next(number for number, row in enumerate(rows) if row.get("name") == first.name)
    rows[place]["key"] = second.key
    (dump / "index-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with DumpReader(dump) as reader, pytest.raises(ContractError):
        reader.load(reader.select(name=first.name)[0])


def test_pipes_are_not_waited_for(dump):
    for name in ("index-00000.jsonl", "tensors-00000-00000.safetensors"):
        data = (dump / name).read_bytes()
        (dump / name).unlink()
        os.mkfifo(dump / name)
        with pytest.raises(ContractError), DumpReader(dump) as reader:
            reader.load(reader.select(status="stored")[0])
        (dump / name).unlink()
        (dump / name).write_bytes(data)


def test_a_missing_and_a_short_file(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "large"
    monkeypatch.setattr(writer, "SHARD_BYTES", 2**20)
    run(folder, steps=3, model=Small(features=512, hidden=300), rows=256)
    names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    assert len(names) > 1
    (folder / names[1]).unlink()
    with DumpReader(folder) as reader:
        assert reader.missing_files == (names[1],)
        for record in reader.records:
            with pytest.raises(ContractError) if record.file == names[1] else nullcontext():
                reader.load(record)
    assert main(["show", str(folder)]) == 0
    assert f"1 files that the index names are missing: {names[1]}" in capsys.readouterr().out
    path = folder / names[0]
    path.write_bytes(path.read_bytes()[:-5])
    with DumpReader(folder) as reader, pytest.raises(ContractError, match="is damaged: "):
        reader.load(next(record for record in reader.records if record.file == names[0]))


def test_an_index_with_a_torn_end(dump, capsys):
    path = dump / "index-00000.jsonl"
    whole = len(DumpReader(dump).records)
    with path.open("ab") as file:
        file.write(b'{"name": "half a r')
    assert (len(DumpReader(dump).records), DumpReader(dump).torn) == (whole, 18)
    assert main(["show", str(dump)]) == 0
    assert "18 bytes at the end of an index were left by a killed process" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b'{"format": "tiny-onn tensor dump", "version": 9}\n', b"[1\n"])
def test_a_file_that_is_no_index(tmp_path, content):
    (tmp_path / "index-00000.jsonl").write_bytes(content)
    with pytest.raises(ContractError, match=r"index-00000.jsonl is (no index|damaged)"):
        DumpReader(tmp_path)
