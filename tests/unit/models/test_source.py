"""Folders and cache keys of sources, and messages of the hub; no test connects to the real one."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError
from pico import write_pico

from instruments.errors import UserError
from models.check import check_source
from models.config import ModelConfig
from models.source import (
    EMBEDDED,
    config_folder,
    hub_answers,
    offline_by_choice,
    read_config,
    resolve_folder,
    source_cache_key,
)


def hub(name="nobody/nothing", revision=None):
    return ModelConfig(kind="hub", name=name, revision=revision)


def test_no_connection_and_nothing_cached():
    (error,) = check_source(hub())
    assert error.what == "HF_HUB_OFFLINE is set and the model is not in the cache"
    assert error.where == "model.name=nobody/nothing, model.revision=main"
    assert error.do.startswith("HF_HUB_OFFLINE=0 before the command, or model=local model.path=")
    for read in (resolve_folder, source_cache_key):
        with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
            read(hub())


def test_a_hub_that_does_not_answer_is_given_up_within_five_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        started = time.perf_counter()
        (error,) = check_source(hub())
    assert 2 < time.perf_counter() - started < 5
    assert error.what == f"the hub cannot be reached at {address} and the model is not in the cache"
    assert "HF_ENDPOINT=https://<mirror>" in error.do
    assert not hub_answers()
    monkeypatch.setattr("models.source._answers", lambda _address: True)
    monkeypatch.setattr("models.source.monotonic", lambda: time.monotonic() + 40)
    assert hub_answers()  # later it does
    assert not offline_by_choice()


def test_no_name_and_a_name_the_hub_does_not_allow():
    (error,) = check_source(hub(None))
    assert (error.what, error.where) == ("model=hub needs a repository", "model.name")
    (error,) = check_source(hub("a b//c", "v2"))
    assert error.what.startswith("the hub refused: Repo id must be in the form")
    assert error.where == "model.name=a b//c, model.revision=v2"
    assert error.do.endswith("for a gated model: hf auth login")


def test_pickle_repositories_are_refused_before_they_are_downloaded(tmp_path, monkeypatch):
    config = tmp_path / "0123abc" / "config.json"
    config.parent.mkdir()
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"), 8)
    config.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 61, **sizes}))
    monkeypatch.setattr("models.source.hf_hub_download", lambda *_args, **_more: str(config))
    files = [SimpleNamespace(filename=name) for name in ("config.json", "pytorch_model.bin")]
    monkeypatch.setattr("models.source.hub_answers", lambda: True)
    monkeypatch.setattr("models.source.snapshot_download", lambda *_args, dry_run, **_more: files)
    (error,) = check_source(hub())
    assert error.what == "pickle checkpoint refused: pytorch_model.bin can run any code when opened"
    assert error.where == "nobody/nothing"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), HTTPError("reset"), RuntimeError("xet")])
def test_a_download_that_breaks_off_says_why(monkeypatch, error):
    def fail(*_args, **_more):
        raise error

    monkeypatch.setattr("models.source.hub_answers", lambda: True)
    monkeypatch.setattr("models.source.hf_hub_download", fail)
    (found,) = check_source(hub())
    assert found.what.startswith("the model cannot be downloaded to ")
    assert found.what.endswith(str(error))


def test_code_is_downloaded_only_where_it_is_trusted(monkeypatch):
    asked = []

    def snapshot(_name, *, revision, allow_patterns, local_files_only):
        asked.append(allow_patterns)
        return str(EMBEDDED)

    monkeypatch.setattr("models.source.snapshot_download", snapshot)
    resolve_folder(hub())
    trusted = hub()
    trusted.trust_remote_code = True
    resolve_folder(trusted)
    assert "*.py" not in asked[0]
    assert asked[1] == [*asked[0], "*.py"]
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in asked[1])


def test_shards_of_any_name_in_the_index_are_downloaded(tmp_path, monkeypatch):
    """As in Qwen3.6-27B-FP8; a second copy of the weights in no index is not."""
    folder, asked = tmp_path / "0123abc", []
    folder.mkdir()
    names = {"a.weight": "layers-0.safetensors", "b.weight": "outside.safetensors", "c.weight": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def snapshot(_name, *, revision, allow_patterns, local_files_only=False):
        asked.append((revision, allow_patterns))
        for name in {"model-1.safetensors"} if "*.json" in allow_patterns else allow_patterns:
            (folder / name).touch()
        return str(folder)

    monkeypatch.setattr("models.source.hub_answers", lambda: True)
    monkeypatch.setattr("models.source.snapshot_download", snapshot)
    for _ in range(2):
        assert resolve_folder(hub(revision="v2")) == folder
    assert [revision for revision, _ in asked] == ["v2", "0123abc", "v2"]
    assert asked[1][1] == ["layers-0.safetensors", "outside.safetensors"]


def test_embedded_and_local_folders(tmp_path):
    local = ModelConfig(kind="local", label="q", path=str(tmp_path / "b" / ".." / "c"))
    assert (resolve_folder(ModelConfig()), resolve_folder(local)) == (EMBEDDED, Path(str(local.path)))
    assert read_config(config_folder(ModelConfig()))["intermediate_size"] == 1024
    names = [one.source_name for one in (hub("a/b"), local, ModelConfig(label="q", name="a/b"))]
    assert names == ["a/b", "c", "q"]


def test_the_cache_key_follows_all_that_decides_a_result(tmp_path):
    folder = write_pico(tmp_path / "model", "qwen2", max_shard_size="12KB")
    local = ModelConfig(kind="local", path=str(folder))
    shard, before = next(folder.glob("*.safetensors")), source_cache_key(local)
    shard.touch()
    for name in ("LICENSE", "trainer_state.json", "eval_results.json"):  # transformers reads none of them
        (folder / name).write_text("{}")
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
