"""The experts of a layer on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instruments.errors import ContractError
from instruments.safetensors_files import load_tensors, save_tensors
from models.experts import ExpertWeights
from stages.artifacts.experts import ExtractedLayer, load_layer
from stages.artifacts.tensor_file import layer_file, save_layer_checkpoint

E, N, D, S = 3, 4, 6, 5


def random_layer(always_on: int = S) -> ExtractedLayer:
    generator = torch.Generator().manual_seed(1)
    sizes = ((E, N, D), (E, N, D), (E, D, N), (always_on, D), (always_on, D), (D, always_on))
    order = torch.randperm(E * N + always_on, generator=generator).int()
    experts = ExpertWeights(*(torch.randn(size, generator=generator).bfloat16() for size in sizes))
    return ExtractedLayer(experts, order[: E * N].view(E, N), order[E * N :])


def test_a_layer_that_gives_no_expert_to_a_pool(tmp_path: Path) -> None:
    whole = random_layer()
    none = {name: getattr(whole.experts, name)[:0] for name in ("gate_END", "up_END", "down_EDN")}
    empty = ExtractedLayer(replace(whole.experts, **none), whole.neurons[:0], whole.always_on)
    save_layer_checkpoint(tmp_path, 0, empty)
    read = load_layer(tmp_path, 0)
    assert torch.equal(read.shared_down_DS, whole.experts.shared_down_DS)
    assert (read.gate_END.shape, read.up_END.shape, read.down_EDN.shape) == ((0, N, D), (0, N, D), (0, D, N))


@pytest.mark.parametrize("always_on", [S, 0])
def test_layers_come_back_bit_for_bit(tmp_path: Path, always_on: int) -> None:
    layer = random_layer(always_on)
    save_layer_checkpoint(tmp_path, 0, layer)
    read = load_layer(tmp_path, 0)
    for name, tensor in vars(layer.experts).items():
        assert getattr(read, name).dtype == tensor.dtype
        assert torch.equal(getattr(read, name), tensor)
    stored, _facts = load_tensors(layer_file(tmp_path, 0))
    assert torch.equal(stored["neurons"], layer.neurons)
    assert torch.equal(stored["always_on"], layer.always_on)


@pytest.mark.parametrize(
    ("missing", "facts", "what"),
    [
        ("experts.up_END", {}, r"ExtractedLayer has fields \['experts.up_END'\] too many or too few"),
        ("", {"version": 9}, "expected ExtractedLayer version 3, found ExtractedLayer version 9"),
        ("", {"contract": "Partition"}, "expected ExtractedLayer version 3, found Partition version 3"),
    ],
)
def test_a_layer_of_other_fields_another_version_or_another_contract(
    tmp_path: Path, missing: str, facts: dict[str, Any], what: str
) -> None:
    save_layer_checkpoint(tmp_path, 7, random_layer())
    path = layer_file(tmp_path, 7)
    tensors, old = load_tensors(path)
    tensors.pop(missing, None)
    save_tensors(path, tensors, **old | facts)
    with pytest.raises(ContractError, match=what) as caught:
        load_layer(tmp_path, 7)
    assert caught.value.where == str(path)
