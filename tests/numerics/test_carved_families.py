"""Gradient projection of every family: the carved model is the dense one where all experts are on."""

import pytest
import torch
from zoo.checkpoints import CARVED, write_checkpoint

from instruments.errors import ConfigError
from models.config import ModelConfig, MoEShape
from models.ffn import DenseFFN, ffn_modules
from models.finding import find_decoder
from models.loading import load_dense
from models.routing import LinearRouter
from models.targets.config_json import count_dense
from stages.evaluate.comparison import count_parameters
from stages.losses import save_memory
from stages.project.carved_model import CarvedModel
from stages.routing.task import make_loop
from stages.text.batches import TokenSequence, batch_sequences

E = 4
# Whose class reads more of the decoder than its last hidden states: fields of its output, attributes, positions.
FAST = {
    *("gemma3_image", "gemma4_text", "qwen3_5_image", "chameleon_image"),
    *("falcon", "falcon_h1", "gpt_neox_japanese", "moss_transcribe_diarize", "xlstm", "llama"),
}


def cut(dense, top_k):
    """For each layer all neurons in E experts behind random routers."""
    generator = torch.Generator().manual_seed(1)
    for mlp in ffn_modules(dense):
        if not mlp.down_proj.in_features:  # a layer without an FFN
            yield None
            continue
        ffn = DenseFFN.of(mlp, torch.zeros(0))
        rows_ED = 0.05 * torch.randn(E, ffn.gate_FD.shape[1], generator=generator)
        neurons_EN, none = torch.arange(ffn.width).view(E, -1), torch.arange(0)
        yield make_loop(ffn, neurons_EN, none, LinearRouter.without_bias(rows_ED), top_k)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for names in CARVED.values() for name in names],
)
def test_the_carved_model_is_the_dense_one_with_all_experts_on_and_has_gradients(name, tmp_path):
    folder = write_checkpoint(name, tmp_path / "dense")
    dense = load_dense(ModelConfig(kind="local", path=str(folder), dtype="float32", device="cpu"), folder)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(10, 200, (length,), generator=generator).tolist() for length in (12, 9)]
    batches = batch_sequences([TokenSequence(str(number), row, row) for number, row in enumerate(ids)], 24, 0)
    whole, half = (CarvedModel(dense, [*cut(dense, top_k)]) for top_k in (E, 2))
    taught = half.teach(batches)
    assert abs(exact := whole.divergence(taught)) < 1e-4
    assert half.divergence(taught) > 2 * abs(exact)
    (total, active), counted = count_parameters(dense, MoEShape(E, 1, 2, 0)), count_dense(find_decoder(folder))
    assert 0 < active <= total
    assert total - active == pytest.approx(counted.total - counted.active, rel=0.02)  # some classes have more tensors
    weights, found = [weight for _, weight in half.weights()], {}
    half.backward(taught[0], weights, found.__setitem__)
    assert found.keys() == {*range(len(weights))}
    assert all(gradient.isfinite().all() and gradient.any() for gradient in found.values())


def test_layers_that_transformers_cannot_recompute_are_refused(tmp_path):
    folder = write_checkpoint("gpt_neox_japanese", tmp_path)
    dense = load_dense(ModelConfig(kind="local", path=str(folder), device="cpu"), folder)
    with pytest.raises(ConfigError, match="cannot recompute the layers of GPTNeoXJapaneseForCausalLM"):
        save_memory(dense, asked=True)
