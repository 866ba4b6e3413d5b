from pathlib import Path

import pytest
import torch
from pico import write_pico

from instruments.errors import CheckpointError, ConfigError
from models.config import ModelConfig
from models.loading import load_dense, load_tokenizer, resolve_device, resolve_dtype
from models.source import EMBEDDED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pico(tmp_path_factory.mktemp("pico"), "llama", dtype=torch.bfloat16)


def test_the_dense_model_is_frozen_and_in_evaluation_mode(folder: Path) -> None:
    dense = load_dense(ModelConfig(device="cpu"), folder)
    assert not dense.training
    assert not any(parameter.requires_grad for parameter in dense.parameters())
    assert dense.config._attn_implementation == "sdpa"
    assert dense.dtype == torch.float32
    assert load_dense(ModelConfig(device="cpu", dtype="bfloat16"), folder).dtype == torch.bfloat16


def test_auto_takes_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu() -> None:
    assert resolve_dtype(ModelConfig(), CPU) == torch.float32
    assert resolve_dtype(ModelConfig(), torch.device("cuda")) is None
    assert resolve_dtype(ModelConfig(dtype="float16"), CPU) == torch.float16


def test_unknown_device() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_device(ModelConfig(device="gpu"))
    assert str(caught.value) == "unknown device 'gpu'\n  where: model.device\n  do:    model.device=auto"


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        resolve_device(ModelConfig(device="cuda:2"))
    assert str(caught.value) == (
        "device cuda:2 is not here: 2 GPUs found\n"
        "  where: model.device\n"
        "  do:    model.device=auto, or model.device=cpu"
    )
    assert resolve_device(ModelConfig(device="cuda:1")) == torch.device("cuda:1")


def test_tokenizer_of_the_embedded_model() -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    assert tokenizer.decode(tokenizer("def main():")["input_ids"]) == "def main():"


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert caught.value.what.startswith("no usable tokenizer: ")
    assert caught.value.where == str(folder)
    assert caught.value.do == "put the model's tokenizer files beside its config.json"


def test_an_empty_tokenizer_is_none(tmp_path: Path) -> None:
    """Without tokenizer files transformers gives a Qwen model one that knows no token."""
    folder = write_pico(tmp_path, "qwen2")
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        "no usable tokenizer: it finds no token in plain text\n"
        f"  where: {folder}\n"
        "  do:    put the model's tokenizer files beside its config.json"
    )


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = write_pico(tmp_path, "qwen2", tokenizer=True)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 4096', '"vocab_size": 61'))
    with pytest.raises(CheckpointError, match="no usable tokenizer: it has 4096 tokens, the model 61"):
        load_tokenizer(folder)
