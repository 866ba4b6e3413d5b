import json
import os
import shutil
from pathlib import Path

import pytest
from pico import write_pico

from models.config import ModelConfig
from models.source import EMBEDDED, read_source_config, resolve_folder, source_cache_key


@pytest.fixture
def local(tmp_path):
    return ModelConfig(kind="local", path=str(write_pico(tmp_path / "model", "qwen2", max_shard_size="12KB")))


def test_embedded_and_local_folders(local):
    assert resolve_folder(ModelConfig()) == EMBEDDED
    assert resolve_folder(local) == Path(str(local.path))
    assert read_source_config(ModelConfig())["intermediate_size"] == 1024


def test_a_source_is_named_by_its_kind(tmp_path):
    assert ModelConfig(kind="hub", label="q", name="a/b").source_name == "a/b"
    assert ModelConfig(kind="local", label="q", path=str(tmp_path / "b" / ".." / "c")).source_name == "c"
    assert ModelConfig(label="q", name="a/b").source_name == "q"


def test_the_cache_key_follows_all_that_decides_a_result(local):
    folder = Path(str(local.path))
    shard, before = next(folder.glob("*.safetensors")), source_cache_key(local)
    shard.touch()
    (folder / "LICENSE").write_text("free")
    assert source_cache_key(local) == before
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
    others = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt")
    for name in others:
        (folder / name).write_text("{}")
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=times)
    changed = source_cache_key(local)["files"].items() - before["files"].items()
    assert {name for name, _hash in changed} >= {"config.json", *others, shard.name}
    shutil.copyfile(shard, folder / "model-copy.safetensors")  # in no index
    assert "model-copy.safetensors" not in source_cache_key(local)["files"]
