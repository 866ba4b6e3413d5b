"""Mutated results, also manifests with a valid seal, are refused."""

import json
import shutil
from random import Random

import pytest
from fuzz.mutants import Trials, mutate_bytes, mutate_json

from instruments.errors import ContractError
from pipeline.artifacts import MANIFEST, Manifest, _seal, describe_files, verify
from stages.artifacts.job import Table
from stages.artifacts.rendering import render

COUNTS = [pytest.param(10, id="quick"), pytest.param(300, id="long", marks=pytest.mark.slow)]


def mutate(random, name, data):
    """Mutate the JSON of manifests (and seal them) and of most other JSON files; otherwise mutate bytes."""
    if not name.endswith((".json", ".jsonl")) or (name != MANIFEST and random.random() < 0.3):
        return mutate_bytes(random, data)
    if name.endswith(".jsonl"):
        return b"".join(
            json.dumps(mutate_json(random, json.loads(line))).encode() + b"\n" for line in data.splitlines()
        )
    content = json.loads(data)
    seal = content.pop("seal", None)
    content = mutate_json(random, content)
    if seal is not None and isinstance(content, dict):
        content["seal"] = _seal(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize("count", COUNTS)
def test_published_results(tmp_path, count):
    """All damage to files is detected; no manifest leads out of its folder or causes a traceback."""
    random, trials = Random(9), Trials()
    folder = tmp_path / "cluster" / "0123456789abcdef"
    (folder / "part").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(200)))
    (folder / "part" / "b.json").write_text('{"a": 1}')
    table = Table("title", ["a", "b"], [["x", 1], [2.5, None]], ["note"])
    Manifest("0123456789abcdef01", {"stage": "cluster"}, describe_files(folder), table).write(folder)
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)

    def use():
        verify(folder, remedy="again")
        manifest = Manifest.read(folder, remedy="again")
        return render(manifest.table, "simple"), manifest.files

    expected = use()
    for _ in range(count):
        name = random.choice([MANIFEST, MANIFEST, MANIFEST, "a.bin", "part/b.json"])
        data = (whole / name).read_bytes()
        mutant = mutate(random, name if name == MANIFEST else "bytes", data)
        (folder / name).write_bytes(mutant)
        found = trials.run(use)
        if name != MANIFEST and mutant != data:
            trials.failures["damage not noticed"] += found is not None
        (folder / name).write_bytes(data)
    assert use() == expected
    assert not +trials.failures, trials


def test_a_result_that_another_manifest_describes_is_refused(tmp_path):
    (tmp_path / "a").write_text("x")
    Manifest("ab", {}, {"a": {"size": "1", "sha256": 3}}, Table("", [], [])).write(tmp_path)
    with pytest.raises(ContractError, match="no readable manifest"):
        verify(tmp_path, remedy="again")
