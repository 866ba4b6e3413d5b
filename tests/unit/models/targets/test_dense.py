import pytest
from pico import write_pico

from models.checkpoint.shards import ShardReader
from models.dense import DENSE_FAMILIES, check_features, check_tensors
from models.source import read_config


def shapes_of(folder):
    with ShardReader(folder) as reader:
        return {name: reader.shape(name) for name in reader.names}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("model_type", DENSE_FAMILIES)
def test_the_table_names_every_tensor_of_a_checkpoint(model_type, biased, tmp_path):
    family = DENSE_FAMILIES[model_type]
    more = {"attention_bias": True} if biased and family.qkv_bias == "attention_bias" else {}
    folder = write_pico(tmp_path, model_type, hidden=24, intermediate=40, **more)
    config = read_config(folder)
    assert check_features(config, family) == []
    assert check_tensors(shapes_of(folder), config, family) == []


def test_a_fused_projection_of_another_shape(tmp_path):
    folder = write_pico(tmp_path, "phi3", layers=1)
    config = read_config(folder)
    shapes = shapes_of(folder) | {"model.layers.0.mlp.gate_up_proj.weight": (78, 24)}
    del shapes["model.layers.0.self_attn.qkv_proj.weight"]
    assert [error.where for error in check_tensors(shapes, config, DENSE_FAMILIES["phi3"])] == [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight is (78, 24), not (80, 24)",
    ]


@pytest.mark.parametrize("model_type", ["gemma3_text", "smollm3"])
def test_rotations_that_differ_between_layers_are_for_gemma_3_alone(model_type):
    sizes = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"), 8
    )
    rope = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}
    found = check_features(sizes | {"rope_parameters": rope}, DENSE_FAMILIES[model_type])
    assert len(found) == (model_type != "gemma3_text")
