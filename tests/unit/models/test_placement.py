import pytest
import torch
from pico import write_pico
from torch import nn

from models import loading as module
from models.config import ModelConfig
from models.ffn import dense_weight, ffn_modules
from models.loading import input_device, is_offloaded, load_dense, placement

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of several shards with a tied head."""
    return write_pico(tmp_path_factory.mktemp("pico"), "qwen3", layers=3, tie=True, max_shard_size="12KB")


def load(folder, **settings):
    return load_dense(ModelConfig(device="cpu", **settings), folder)


def test_a_model_that_fits_is_not_offloaded(folder):
    assert placement(ModelConfig(), CUDA) == {"device_map": {"": CUDA}}
    model = load(folder)
    assert input_device(model) == CPU
    assert not any(map(is_offloaded, (model, load(folder, device_map="auto"))))
    stray = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, device="meta"))
    assert is_offloaded(stray)


def test_limits_of_memory(monkeypatch):
    monkeypatch.setattr(module, "get_max_memory", lambda: {0: 70, 1: 80, "cpu": 900})
    balanced = ModelConfig(device_map="balanced")
    assert placement(balanced, CPU) == {"device_map": "balanced", "max_memory": {"cpu": 900}}
    assert placement(balanced, CUDA) == {"device_map": "balanced", "max_memory": {0: 70, 1: 80, "cpu": 900}}
    limited = ModelConfig(device_map="auto", gpu_memory="20gb", cpu_memory="1TiB")
    expected = {0: 20 * 10**9, 1: 20 * 10**9, "cpu": 2**40}
    assert placement(limited, CUDA) == {"device_map": "auto", "max_memory": expected}


# 60KB: some layers on the CPU, the others on disk; 1KB: everything on disk.
@pytest.mark.parametrize("memory", ["60KB", "1KB"])
@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_what_does_not_fit_stays_on_disk(folder, device_map, memory):
    whole, offloaded = load(folder), load(folder, device_map=device_map, cpu_memory=memory)
    assert is_offloaded(offloaded)
    places = set(offloaded.hf_device_map.values())
    assert places == ({"cpu", "disk"} if memory == "60KB" else {"disk"})
    assert input_device(offloaded) == CPU
    ids = torch.arange(1, 8)[None]
    assert torch.equal(offloaded(ids).logits, whole(ids).logits)
    for mine, theirs in zip(ffn_modules(offloaded), ffn_modules(whole), strict=True):
        assert torch.equal(dense_weight(mine.down_proj), theirs.down_proj.weight)
    assert is_offloaded(offloaded)
