"""Mutated tensor dumps (indices, manifests, shards) are refused with a message or read as they were written."""

import json
import shutil
from random import Random

import pytest
import torch
from fuzz.mutants import Trials, mutate_bytes, mutate_json, mutate_shard_header
from unit.instruments.tensor_dump.small_model import run

from instruments.tensor_dump.command import compare_folders, complaints_of, summarise
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_files import export_pt

COUNTS = [pytest.param(60, id="quick"), pytest.param(600, id="long", marks=pytest.mark.slow)]
TARGETS = {
    "index bytes": "index-00000.jsonl",
    "index JSON": "index-00000.jsonl",
    "manifest JSON": "manifest-00000.json",
    "shard bytes": "tensors-00000-00000.safetensors",
    "shard header": "tensors-00000-00000.safetensors",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "dump"
    run(folder, DumpConfig(quant_type="bf16"), steps=1)
    return folder


def mutate(random, kind, data):
    """Mutate bytes, or JSON in a file that stays consistent otherwise."""
    if kind.endswith("bytes"):
        return mutate_bytes(random, data)
    if kind == "manifest JSON":
        return json.dumps(mutate_json(random, json.loads(data))).encode()
    if kind == "index JSON":
        lines = data.splitlines(keepends=True)
        place = random.randrange(len(lines))
        lines[place] = json.dumps(mutate_json(random, json.loads(lines[place]))).encode() + b"\n"
        return b"".join(lines)
    return mutate_shard_header(random, data)


def use_everything(folder, original, out):
    """Run every command and load every tensor; returns the tensors by name."""
    with DumpReader(folder) as reader:
        summarise(reader)
        list(complaints_of(reader))
        stored = [record for record in reader.records if record.status == "stored"]
        found = {record.name: reader.load(record) for record in stored}
        export_pt(reader, out)
    compare_folders(original, folder, 0.0)
    return found


def files_below(folder):
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*")}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", TARGETS)
def test_mutants(tmp_path, original, kind, count):
    random, trials = Random(4), Trials()
    written = use_everything(original, original, tmp_path / "first")
    assert written
    place = tmp_path / "inner" / "place"
    folder, out = place / "dump", place / "out"
    shutil.copytree(original, folder)
    target = folder / TARGETS[kind]
    data = target.read_bytes()
    for _ in range(count):
        target.write_bytes(mutate(random, kind, data))
        found = trials.run(lambda: use_everything(folder, original, out))
        if kind.startswith("shard") and found is not None:
            same = found.keys() == written.keys() and all(_equal(found[name], written[name]) for name in written)
            trials.failures["other values without a word"] += not same
        outside = files_below(tmp_path) | {f"inner/{name}" for name in files_below(tmp_path / "inner")}
        assert outside == {"first", "inner", "inner/place"}, trials
        assert files_below(place) <= {"dump", "out"}, trials
        shutil.rmtree(out, ignore_errors=True)
    assert not +trials.failures, trials


def _equal(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )
