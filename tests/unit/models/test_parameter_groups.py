import copy
import json
import re
from pathlib import Path

import pytest
import torch
from pico_moes import MOES, SIZES, make_moe
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from instruments.errors import CheckpointError
from models.training import STRAIGHT_THROUGH, Part, RouterWatch, find_routers, parameter_groups, part_of, show_scores

RECIPES = Path(__file__).parents[3] / "stages/train/RECIPES.md"


@pytest.fixture(params=MOES)
def moe(request):
    return make_moe(request.param)


def test_every_parameter_of_every_architecture_has_its_part(moe):
    names = {part: [name for name, _ in moe.named_parameters() if part_of(name) is part] for part in Part}
    assert len(names[Part.ROUTER]) == 2
    assert all(moe.get_parameter(name).shape == (5, 24) for name in names[Part.ROUTER])
    assert {"gate_up_proj", "down_proj"} <= {name.rpartition(".")[2] for name in names[Part.EXPERTS]}
    ffn = ("mlp", "block_sparse_moe")
    for name in names[Part.REST]:
        assert not any(f".{word}." in name for word in ffn), name


def test_groups_hold_what_learns_and_freeze_the_rest(moe):
    groups = parameter_groups(moe, router_rate=0.3, expert_rate=0.2, rest_rate=0.0, weight_decay=0.1)
    assert {group["name"]: group["lr"] for group in groups} == {"router": 0.3, "experts": 0.2}
    assert all(group["weight_decay"] == 0 for group in groups if group["name"] == "router")
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    assert grouped == {id(parameter) for parameter in moe.parameters() if parameter.requires_grad}
    assert not moe.get_input_embeddings().weight.requires_grad
    torch.optim.AdamW(groups).step()
    groups = parameter_groups(moe, expert_rate=1e-4, rest_rate=1e-5, weight_decay=0.1)
    assert all(parameter.requires_grad for parameter in moe.parameters())  # what was frozen learns again
    kept = [p for group in groups if not group["weight_decay"] for p in group["params"]]
    assert {p.ndim for p in kept} == {1, 2}  # norms, biases and routers do not decay
    assert all(p.shape == (5, 24) for p in kept if p.ndim == 2)


def test_what_is_frozen_below_adapters_stays_frozen():
    moe = make_moe("qwen3_moe").requires_grad_(False)
    moe.peft_config = {}  # as PEFT marks a model with adapters
    learns = moe.get_parameter("model.layers.0.mlp.gate.weight").requires_grad_()
    (group,) = parameter_groups(moe, rest_rate=1e-5)
    assert group["name"] == "router"
    assert group["params"] == [learns]
    assert [parameter for parameter in moe.parameters() if parameter.requires_grad] == [learns]


def test_adapters_that_one_phase_froze_learn_in_the_next():
    moe = make_moe("qwen3_moe").requires_grad_(False)
    moe.peft_config = {}
    adapter = moe.get_parameter("model.layers.1.mlp.experts.down_proj").requires_grad_()
    assert parameter_groups(nn.ModuleDict({"module": moe}), expert_rate=0.0) == []  # as DistributedDataParallel has it
    (group,) = parameter_groups(moe)
    assert group["params"] == [adapter]


class Adapted(nn.Module):
    """A module with the parameters of PEFT's adapters for one weight."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.ModuleDict({"default": nn.Linear(24, 2, bias=False)})

    def forward(self, *inputs):
        return self.base_layer(*inputs)


def test_the_adapters_of_a_router_are_its_part_and_its_choices_are_seen():
    moe = make_moe("glm4_moe")
    for layer in moe.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, 5))
        layer.mlp.gate, layer.mlp.experts = Adapted(layer.mlp.gate), Adapted(layer.mlp.experts)
    moe.set_experts_implementation(STRAIGHT_THROUGH)
    show_scores(moe)
    with RouterWatch(moe).collect() as routings:
        moe(torch.arange(14).view(2, 7), use_cache=False)
    assert len(routings) == len(find_routers(moe)) == 2
    for layer, routing in zip(moe.model.layers, routings, strict=True):
        best_TK = layer.mlp.experts.base_layer.router_scores.topk(2).indices
        assert torch.equal(best_TK.sort(1).values, routing.chosen_TK.sort(1).values)
    adapters = {id(layer.mlp.gate.lora_A.default.weight) for layer in moe.model.layers}
    (routers,) = [group["params"] for group in parameter_groups(moe) if group["name"] == "router"]
    assert len(routers) == 4
    assert adapters < {id(parameter) for parameter in routers}


def test_a_dense_model_is_refused():
    with pytest.raises(CheckpointError, match="the model has no routers") as caught:
        parameter_groups(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES)))
    assert caught.value.do == "load the checkpoint of stage=assemble or stage=project"


def test_a_bias_that_only_chooses_is_fixed_and_a_router_within_a_module_learns():
    moe = make_moe("ernie4_5_moe")
    parameter_groups(moe, rest_rate=1e-5)
    frozen = [name for name, parameter in moe.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias" for layer in range(2)]
    moe = make_moe("hunyuan_v1_moe")
    (routers,) = [group["params"] for group in parameter_groups(moe) if group["name"] == "router"]
    assert {id(parameter) for parameter in routers} == {id(layer.mlp.gate.wg.weight) for layer in moe.model.layers}


def test_what_a_target_fixes_is_fixed_in_its_carved_layers_alone():
    moe = make_moe("gemma4_text")
    moe.vision_tower = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": moe.model.layers[0].mlp})])})
    moe.vision_tower["layers"][0] = copy.deepcopy(moe.vision_tower["layers"][0])
    parameter_groups(moe, rest_rate=1e-5)
    frozen = {name for name, parameter in moe.named_parameters() if not parameter.requires_grad}
    fixed = ("mlp.down_proj.weight", "router.scale", "router.per_expert_scale")
    assert frozen == {f"model.layers.{layer}.{name}" for layer in range(2) for name in fixed}


def test_adapters_of_what_a_target_fixes_learn_no_more_than_that_does():
    moe = make_moe("gemma4_text").requires_grad_(False)
    moe.peft_config = {}
    for layer in moe.model.layers:
        layer.mlp.down_proj, layer.mlp.up_proj = Adapted(layer.mlp.down_proj), Adapted(layer.mlp.up_proj)
    parameter_groups(moe, rest_rate=1e-5)
    learn = {name for name, parameter in moe.named_parameters() if parameter.requires_grad}
    assert learn == {f"model.layers.{layer}.mlp.up_proj.lora_A.default.weight" for layer in range(2)}


def test_the_recipe_of_peft_names_the_experts_of_every_architecture(moe):
    named = re.search(r"experts = (\[.*\])", RECIPES.read_text())[1]
    names = [name for name, parameter in moe.named_parameters() if parameter.ndim == 3]
    assert names
    assert all(name.endswith(tuple(f".{part}" for part in json.loads(named))) for name in names)
