from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from instruments.errors import ContractError
from instruments.safetensors_files import load_tensors, save_tensors
from models.experts import ExpertWeights
from stages.artifacts.experts import layer_file, load_layer, save_layer, verify_layer

E, N, D, S = 3, 4, 6, 5
REMEDY = "  do:    stage=extract fresh=true"


def random_layer(always_on: int = S) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((E, N, D), (E, N, D), (E, D, N), (always_on, D), (always_on, D), (D, always_on))
    order = torch.randperm(E * N + always_on, generator=generator).int()
    experts = ExpertWeights(*(torch.randn(size, generator=generator).bfloat16() for size in sizes))
    return experts, order[: E * N].view(E, N), order[E * N :]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_layer(tmp_path, 7, *random_layer())
    return tmp_path


def test_a_layer_that_gives_no_expert_to_a_pool(tmp_path: Path) -> None:
    experts, neurons_EN, always_S = random_layer()
    none = {name: getattr(experts, name)[:0] for name in ("gate_END", "up_END", "down_EDN")}
    save_layer(tmp_path, 0, replace(experts, **none), neurons_EN[:0], always_S)
    read = load_layer(tmp_path, 0)
    assert torch.equal(read.shared_down_DS, experts.shared_down_DS)
    assert (read.gate_END.shape, read.up_END.shape, read.down_EDN.shape) == ((0, 0, D), (0, 0, D), (0, D, 0))


@pytest.mark.parametrize("always_on", [S, 0])
def test_layers_come_back_bit_for_bit(tmp_path: Path, always_on: int) -> None:
    experts, neurons_EN, always_S = random_layer(always_on)
    size = save_layer(tmp_path, 0, experts, neurons_EN, always_S)
    assert size == layer_file(tmp_path, 0).stat().st_size
    read = load_layer(tmp_path, 0)
    for name, tensor in vars(experts).items():
        assert getattr(read, name).dtype == tensor.dtype
        assert torch.equal(getattr(read, name), tensor)
    stored = load_file(layer_file(tmp_path, 0))
    assert torch.equal(torch.stack([stored[f"experts.{e}.neurons"] for e in range(E)]), neurons_EN)
    assert torch.equal(stored["always_on.neurons"], always_S)


def test_names_on_disk(folder: Path) -> None:
    with safe_open(folder / "layer-00007.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes["experts.2.gate_proj.weight"] == shapes["experts.0.up_proj.weight"] == (N, D)
    assert shapes["experts.1.down_proj.weight"] == (D, N)
    assert shapes["always_on.gate_proj.weight"] == (S, D)
    assert shapes["always_on.down_proj.weight"] == (D, S)
    assert shapes["experts.0.neurons"] == (N,)
    assert len(shapes) == (E + 1) * 4


def test_no_such_layer(folder: Path) -> None:
    path = folder / "layer-00008.safetensors"
    with pytest.raises(ContractError) as caught:
        load_layer(folder, 8)
    assert str(caught.value) == f"cannot read experts: layer-00008.safetensors is missing\n  where: {path}\n{REMEDY}"


def test_truncated_file(folder: Path) -> None:
    path = layer_file(folder, 7)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ContractError) as caught:
        load_layer(folder, 7)
    damage = f"layer-00007.safetensors is damaged: truncated: {size - 8} bytes, the header says {size}"
    assert str(caught.value) == f"cannot read experts: {damage}\n  where: {path}\n{REMEDY}"


def test_missing_tensor(folder: Path) -> None:
    path = layer_file(folder, 7)
    tensors, facts = load_tensors(path)
    del tensors["experts.1.up_proj.weight"]
    save_tensors(path, tensors, **facts)
    with pytest.raises(ContractError) as caught:
        load_layer(folder, 7)
    assert caught.value.what == "cannot read experts: there is no tensor experts.1.up_proj.weight"


def test_another_version(folder: Path) -> None:
    path = layer_file(folder, 7)
    save_tensors(path, load_file(path), version=9, experts=3)
    with pytest.raises(ContractError) as caught:
        load_layer(folder, 7)
    assert str(caught.value) == f"expected experts version 2, found 9\n  where: {path}\n{REMEDY}"


def test_verification_sees_one_bit(folder: Path) -> None:
    experts, *_neurons = random_layer()
    verify_layer(folder, 7, experts)
    experts.up_END[1].view(torch.int16)[2, 3] ^= 1
    with pytest.raises(ContractError) as caught:
        verify_layer(folder, 7, experts)
    assert str(caught.value) == (
        f"experts.1.up_proj.weight on disk differs from the dense weights\n  where: layer 7\n{REMEDY}"
    )
