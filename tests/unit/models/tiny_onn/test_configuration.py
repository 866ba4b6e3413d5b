import json

import pytest
from transformers import AutoConfig

import models.tiny_onn.register  # noqa: F401
from models.tiny_onn.configuration_tiny_onn import TinyONNConfig, _rope_of_version_4

DENSE = {
    **{"model_type": "gemma2", "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 61, "sliding_window": 4},
    **{"final_logit_softcapping": 2.0, "tie_word_embeddings": False, "eos_token_id": 7},
}


def test_shared_keys_are_read_from_the_dense_configuration():
    config = TinyONNConfig(DENSE, num_experts=5, num_experts_per_tok=2)
    assert (config.vocab_size, config.num_hidden_layers, config.sliding_window, config.eos_token_id) == (61, 3, 4, 7)
    assert config.layer_types == config.dense.layer_types
    assert config.tie_word_embeddings is False
    assert config.dense.query_pre_attn_scalar == 256
    assert not hasattr(config, "query_pre_attn_scalar")


def test_what_follows_the_last_hidden_states_is_there_for_who_computes_logits_from_them():
    """TRL and vLLM; without these keys they compute other logits than the model."""
    assert TinyONNConfig(DENSE).final_logit_softcapping == 2.0
    assert TinyONNConfig(DENSE).logit_scale == 1.0
    granite = TinyONNConfig({"model_type": "granite", "logits_scaling": 8.0})
    assert granite.logit_scale == 0.125
    llama = TinyONNConfig({"model_type": "llama"})
    absent = ((granite, "final_logit_softcapping"), (llama, "sliding_window"), (llama, "layer_types"))
    assert not any(hasattr(config, key) or key in config.to_dict() for config, key in absent)


def test_it_survives_the_way_to_disk_and_back(tmp_path):
    config = TinyONNConfig(
        DENSE, 5, 2, 8, 3, routed_scaling_factor=2.0, norm_topk_prob=False, topology="global_pool",
        router_aux_loss_coef=0.5, output_router_logits=True, vocab_size=67,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is TinyONNConfig
    drop = ("transformers_version", "_name_or_path")
    wanted, found = ({key: value for key, value in c.to_dict().items() if key not in drop} for c in (config, again))
    assert found == wanted
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["vocab_size"] == stored["dense"]["vocab_size"] == 67
    assert (stored["model_type"], stored["dense"]["model_type"]) == ("tiny_onn", "gemma2")
    assert (tmp_path / "configuration_tiny_onn.py").exists()
    assert AutoConfig.from_pretrained(tmp_path, use_cache=False).dense.use_cache is False


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"topology": "ring"}, "topology='ring' is not one of per_layer, global_pool"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 is not in 1"),
        ({"num_experts": 2, "num_experts_per_tok": 0}, "num_experts_per_tok=0 is not in 1"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        TinyONNConfig(DENSE, **keys)


def test_position_encodings_are_said_in_the_keys_of_transformers_4():
    assert _rope_of_version_4({}) == {}
    assert _rope_of_version_4({"rope_type": "default", "rope_theta": 3e3}) == {"rope_theta": 3e3, "rope_scaling": None}
    yarn = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0}
    assert _rope_of_version_4(yarn) == {"rope_theta": 2e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    by_kind = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e2},
    }
    assert _rope_of_version_4(by_kind) == {
        "rope_theta": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 3e2,
    }
