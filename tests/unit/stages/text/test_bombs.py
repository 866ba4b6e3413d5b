"""Text made to exhaust memory or time: refused with a message, or read only as far as needed."""

import gzip
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from instruments.errors import DataError
from stages.text.cache_key import check_first_records
from stages.text.config import DataConfig
from stages.text.documents import MAX_CHARACTERS, MAX_MESSAGES, Document, bound_documents
from stages.text.hub import read_hub
from stages.text.sources import MAX_LINE, list_files, read_documents, read_file

GIB, MIB = 2**30, 2**20


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.fixture(autouse=True)
def within_five_seconds_and_800_mib():
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    started, before = time.process_time(), memory("VmRSS")
    yield
    assert time.process_time() - started < 5
    assert memory("VmHWM") - before < 800 * MIB  # up to half a GiB may be unpacked, for a moment twice


def write_hole(path, begin=b""):
    """Write a sparse file of 1 GiB without a newline."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(GIB)
    return path


def refusal(path, **settings):
    with pytest.raises(DataError) as caught:
        list(read_file(path, DataConfig(kind="text", **settings)))
    return str(caught.value)


def test_a_record_of_a_gigabyte(tmp_path):
    path = write_hole(tmp_path / "a.jsonl", b'{"text": "one"}\n{"text": "')
    assert refusal(path).startswith(f"a record is longer than 8 MiB\n  where: {path}:2")
    errors = check_first_records(DataConfig(kind="text", path=str(path)))
    assert [error.what for error in errors] == ["a record is longer than 8 MiB"]


def test_a_line_of_a_gigabyte_is_read_as_far_as_it_is_needed(tmp_path):
    path = write_hole(tmp_path / "a.txt", b"word " * 40_000)
    documents = read_documents(DataConfig(kind="text", path=str(path), heldout_share=1e-9), "calibration")
    found = [next(documents) for _ in range(7)]
    assert all(0 < len(document.text) <= MAX_LINE for document in found)
    assert set(found[0].text.split()) == {"word"}


@pytest.mark.parametrize("letter", ["a", "é", "龙", "🦞"])
@pytest.mark.parametrize("shift", range(4))
def test_long_lines_are_cut_between_characters(tmp_path, letter, shift):
    text = "b" * shift + letter * 50_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = [document.text for document in read_file(tmp_path / "a.txt", DataConfig(kind="text"))]
    assert "".join(found) == text
    assert max(len(part.encode()) for part in found) <= MAX_LINE


def test_long_lines_are_cut_at_spaces(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 12_000 + "\nlast\n", encoding="utf-8")
    found = [document.text for document in read_file(tmp_path / "a.txt", DataConfig(kind="text"))]
    assert " ".join(found).split() == ["some", "words"] * 12_000 + ["last"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("[" * 500_000, "it is nested too deeply"),
        ('{"text": "a", "number": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
        ("\0" * 5000, "Expecting value"),
    ],
    ids=["nested", "digits", "zeros"],
)
def test_json_that_breaks_readers(tmp_path, record, why):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + record + "\n")
    text = refusal(path)
    assert text.startswith(f"not a JSON record: {why}")
    assert f"where: {path}:2" in text


def test_many_small_values_in_one_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "more": [' + "[]," * 2_700_000 + "1]}\n")
    assert [document.text for document in read_file(path, DataConfig(kind="text"))] == ["one"]


def test_long_documents_are_cut():
    text = "words and " * 60_000
    parts = list(bound_documents([Document("a:1", text)]))
    assert [part.name for part in parts] == ["a:1, part 1", "a:1, part 2", "a:1, part 3"]
    assert " ".join(part.text for part in parts) == text.strip()
    short = Document("a:2", "x" * MAX_CHARACTERS)
    assert list(bound_documents([short])) == [short]


def converse(*contents):
    roles = ("user", "assistant")
    turns = tuple({"role": roles[number % 2], "content": content} for number, content in enumerate(contents))
    return Document("a:1", messages=turns)


def test_long_conversations_keep_their_first_turns(caplog):
    (found,) = bound_documents([converse(*["a"] * 100_000)])
    assert len(found.messages) == MAX_MESSAGES
    (found,) = bound_documents([converse("a", "b", "c" * MAX_CHARACTERS)])
    assert [message["content"] for message in found.messages] == ["a", "b"]
    assert caplog.messages[1] == "a:1: only the first 2 of 3 messages are read"
    with pytest.raises(DataError, match="the first message is longer than 262,144 characters"):
        list(bound_documents([converse("c" * MAX_CHARACTERS, "d")]))


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines.txt", b"\x1b[31mred.txt"])
def test_names_that_cannot_be_printed(tmp_path, name):
    (tmp_path / os.fsdecode(name)).write_text("text")
    with pytest.raises(DataError) as caught:
        list_files(str(tmp_path), "data.path")
    assert caught.value.what == ("the name of a file is not UTF-8, or holds a line break or another control character")
    assert str(caught.value).isascii()
    with pytest.raises(DataError, match="the name of a file is not UTF-8"):
        list_files(str(tmp_path / os.fsdecode(name)), "data.path")


def read_dataset(folder):
    pytest.importorskip("datasets", reason="the optional extra hub is not installed")
    documents = read_hub(DataConfig(kind="hub", name=str(folder), heldout_share=1e-9), "calibration")
    return [next(documents).text for _ in range(2)]


def test_a_compressed_line_of_gigabytes(tmp_path):
    member = gzip.compress(b"x" * 2**24)
    begin = gzip.compress(json.dumps({"text": "x"}).encode()[:-2])
    (tmp_path / "train.jsonl.gz").write_bytes(begin + member * 128)
    with pytest.raises(DataError) as caught:
        read_dataset(tmp_path)
    assert str(caught.value).startswith("a record or a block of records unpacks to more than 512 MiB")


def test_a_compressed_file_of_gigabytes_is_read_as_far_as_it_is_needed(tmp_path):
    line = json.dumps({"text": "y" * 1000}).encode() + b"\n"
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(line * 10_000, compresslevel=1) * 300)
    assert read_dataset(tmp_path) == ["y" * 1000] * 2


def test_parquet_that_unpacks_to_gigabytes(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * 4000, arrow.int32()), arrow.array(["x" * MIB]))
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "train.parquet", compression="zstd")
    assert (tmp_path / "train.parquet").stat().st_size < 200_000
    with suppress(DataError):  # both are right; the fixture checks memory
        assert read_dataset(tmp_path) == ["x" * MIB] * 2


def test_a_dataset_that_wants_to_run_its_program(tmp_path):
    (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError) as caught:
        read_dataset(tmp_path)
    assert caught.value.what.startswith("cannot read the dataset: Dataset scripts are no longer supported")


def test_compressed_files_that_are_damaged(tmp_path):
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99_000)[:-50])
    with pytest.raises(DataError, match="cannot read the dataset"):
        read_dataset(tmp_path)
