"""Mutated results (manifests with a valid seal, evaluations, records of runs) are refused or drawn as a page."""

import json
import shutil
from random import Random

import pytest
from fuzz.mutants import Trials, mutate_bytes, mutate_json
from unit.pipeline.report_outputs import Outputs

from instruments.errors import ContractError
from pipeline.artifacts import MANIFEST, Manifest, _seal, describe_files, verify
from pipeline.report.page import draw_page, find_source, write_page
from pipeline.run import written_files
from stages.artifacts.job import Table
from stages.artifacts.rendering import render

COUNTS = [pytest.param(10, id="quick"), pytest.param(300, id="long", marks=pytest.mark.slow)]
PIECES = {
    "evaluation": ("evaluate", "evaluation.json"),
    "manifest of evaluate": ("evaluate", MANIFEST),
    "manifest of cluster": ("cluster", MANIFEST),
    "metrics": ("train", "metrics.jsonl"),
    "scores": ("score", "scores.safetensors"),
    "record": ("run", "stages.json"),
    "settings": ("run", "config.yaml"),
}


@pytest.fixture
def outputs(tmp_path):
    return Outputs(tmp_path / "inner" / "outputs")


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
@pytest.mark.parametrize("piece", PIECES)
def test_the_report_of_damaged_results(tmp_path, outputs, piece, count):
    random, trials = Random(8), Trials()
    stage, name = PIECES[piece]
    evaluation = outputs.carve(trained=True)
    outputs.carve(trained=True, top_k=1)
    run = outputs.run(evaluation)
    write_page(find_source(run), run / "report.html")
    (path,) = [run / name] if stage == "run" else [
        path for path in outputs.folder.glob(f"artifacts/pico/{stage}/*/{name}")
        if stage != "evaluate" or path.parent == evaluation
    ][:1]  # fmt: skip
    data, before = path.read_bytes(), sorted(tmp_path.rglob("*"))
    for _ in range(count):
        path.write_bytes(mutate(random, name, data))
        trials.run(lambda: len(draw_page(find_source(run))))
        assert sorted(tmp_path.rglob("*")) == before, trials
    assert not +trials.failures, trials


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
        return render(manifest.table, "simple"), written_files(folder, manifest)

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
