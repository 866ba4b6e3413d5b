"""Mutated checkpoints (config, index, headers, tokenizer) are refused with a message or fully usable."""

import functools
import json
import shutil
from random import Random

import pytest
import torch
from fuzz.mutants import Trials, mutate_bytes, mutate_json, mutate_shard_header
from pico import write_pico

from models.check import check_source
from models.checkpoint.shards import ShardReader
from models.config import ModelConfig, MoEShape
from models.emit import copy_tokenizer_files
from models.finding import find_decoder
from models.loading import load_dense, load_tokenizer
from models.source import explained_config, source_cache_key
from models.stream import LayerStream
from models.targets.config import check_target, select_target
from models.targets.config_json import count_carved, count_dense, emit_config

# transformers warns about odd tokens and dropouts of the mutants.
pytestmark = pytest.mark.filterwarnings("ignore")
COUNTS = [pytest.param(25, id="quick"), pytest.param(800, id="long", marks=pytest.mark.slow)]
TARGETS = {
    "config JSON": "config.json",
    "config bytes": "config.json",
    "index JSON": "model.safetensors.index.json",
    "shard header": "model-00001-of-00002.safetensors",
    "shard bytes": "model-00002-of-00002.safetensors",
    "tokenizer config JSON": "tokenizer_config.json",
    "tokenizer bytes": "tokenizer.json",
}
# The family decides how the two config files are read; all else is read alike.
CASES = [*(("qwen2", kind) for kind in TARGETS), *(("gemma3_text", kind) for kind in TARGETS if "config" in kind)]
SHAPE = MoEShape(experts=3, n=8, top_k=2, always_on=8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Family → its checkpoint, written once."""

    @functools.cache
    def write(family):
        folder = write_pico(tmp_path_factory.mktemp("original"), family, tokenizer=True, max_shard_size="600KB")
        assert len(list(folder.glob("*.safetensors"))) == 2
        return folder

    return write


def mutate(random, kind, data):
    if kind.endswith("bytes"):
        return mutate_bytes(random, data)
    if kind == "shard header":
        return mutate_shard_header(random, data)
    return json.dumps(mutate_json(random, json.loads(data))).encode()


def carve_plan(folder):
    """All checks before weights are loaded, then every tensor and the layer stream; returns the tensors by name."""
    model = ModelConfig(kind="local", path=str(folder), device="cpu")
    if faults := check_source(model):
        raise faults[0]
    source_cache_key(model)
    source = find_decoder(folder)
    with explained_config(folder):
        target = select_target(source, "auto", SHAPE)
        if faults := list(check_target(source, target, SHAPE)):
            raise faults[0]
    json.dumps(emit_config(source, target, SHAPE, "float32", tied=source.tied), allow_nan=False)
    assert count_dense(source).total > 0
    assert count_carved(source, target, SHAPE).total > 0
    with ShardReader(folder) as reader:
        found = {name: reader.tensor(name) for name in reader.names}
    with LayerStream(folder, device=torch.device("cpu")):
        pass
    return found


def diagnose(folder):
    """Load and run the checkpoint as `diagnose.checkpoint=` does, without checking the source first."""
    model = ModelConfig(kind="local", path=str(folder), device="cpu")
    dense = load_dense(model, folder)
    load_tokenizer(folder, trust_remote_code=False)
    with torch.no_grad():
        assert dense(torch.tensor([[1, 2, 3]])).logits.shape[1] == 3


def copy_files(folder, out):
    out.mkdir(exist_ok=True)
    copy_tokenizer_files(folder, out)
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_bytes())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_mutants(tmp_path, original, family, kind, count):
    random, trials = Random(7), Trials()
    written = carve_plan(original(family))
    diagnose(original(family))
    folder, out = tmp_path / "inner" / "model", tmp_path / "inner" / "out"
    shutil.copytree(original(family), folder)
    target = folder / TARGETS[kind]
    data = target.read_bytes()
    for _ in range(count):
        target.write_bytes(mutate(random, kind, data))
        found = trials.run(lambda: carve_plan(folder))
        if found is not None and kind == "index JSON":
            trials.failures["other weights without a word"] += found.keys() != written.keys()
        trials.run(lambda: diagnose(folder))
        if kind == "tokenizer config JSON":
            trials.run(lambda: copy_files(folder, out))
        assert {path.name for path in tmp_path.iterdir()} == {"inner"}, trials
        assert {path.name for path in folder.parent.iterdir()} <= {"model", "out"}, trials
    assert not +trials.failures, trials
