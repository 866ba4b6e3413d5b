"""The layer stream against the whole model in transformers."""

import weakref
from pathlib import Path

import pytest
import torch
from numerics.emission_cases import GEMMA, GEMMA3, LONGROPE, MULTIPLIERS
from pico import edited_tensors, write_pico
from transformers import AutoModelForCausalLM
from zoo.checkpoints import write_checkpoint

from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.stream import LayerStream
from models.targets.config import MOE_TARGETS
from stages.calibration.batches import TokenStream, passed_losses
from stages.losses import measure_loss
from stages.text.batches import TokenSequence, batch_sequences

CPU = torch.device("cpu")


def draw_batches(lengths=(9, 5, 7, 9, 5, 7)):
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for index, length in enumerate(lengths):
        ids = torch.randint(1, 61, (length,), generator=generator).tolist()
        sequences.append(TokenSequence(f"sample {index}", ids, [-100, -100, *ids[2:]] if index else ids))
    return batch_sequences(sequences, 18, 0)


# A window shorter than the text, and layers of two kinds.
KINDS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# Arguments of a layer that depend on the tokens.
INPUTS = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "num_kv_shared_layers": 0,
    "global_head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
CASES = {
    "qwen3": ("qwen3", {}),
    "qwen3-window-in-some-layers": ("qwen3", KINDS | {"use_sliding_window": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", MULTIPLIERS),
    "phi3": ("phi3", {"sliding_window": 4}),
    "phi3-longrope": ("phi3", LONGROPE),
    "gemma2": ("gemma2", GEMMA | KINDS),
    "gemma3_text": ("gemma3_text", GEMMA3 | KINDS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "nemotron": ("nemotron", {}),
    "gemma4_text-inputs-of-each-layer": ("gemma4_text", INPUTS),
    "gemma4_text-keys-of-earlier-layers": (
        "gemma4_text",
        INPUTS | {"num_kv_shared_layers": 1, "use_double_wide_mlp": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tie", [True, False])
def test_the_dense_stream_is_the_model(case, tie, tmp_path: Path, monkeypatch):
    model_type, config = CASES[case]
    if not tie:  # as large embeddings, of which only the rows in use are in memory
        monkeypatch.setattr("models.stream._LAZY_ROWS", 8)
    folder = write_pico(tmp_path, model_type, layers=3, tie=tie, **config)
    batches = draw_batches()
    with LayerStream(folder, device=CPU) as stream, torch.no_grad():
        tokens = TokenStream(stream, batches)
        for layer in stream.layers():
            tokens.enter(layer)
            tokens.leave(map(layer.ffn, tokens.inputs))
        streamed = passed_losses({"": tokens}, stream, batches)[""]
        logits = stream.head()(tokens.passages[0])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        whole = model(input_ids=batches[0].input_ids, attention_mask=batches[0].attention_mask).logits
    mask_BT = batches[0].attention_mask.bool()
    assert not mask_BT.all(), "the batch should hold padding"
    torch.testing.assert_close(logits[mask_BT], whole[mask_BT], rtol=1e-5, atol=1e-5)
    expected = measure_loss(model, batches, "dense")
    assert streamed.tokens == expected.tokens == (8 + 3 + 5) + (7 + 3 + 5)
    assert streamed.nats == pytest.approx(expected.nats, abs=1e-6)


def test_a_layers_arguments_that_depend_on_the_tokens_take_one_pass_a_batch(tmp_path: Path, monkeypatch):
    folder, batches = write_pico(tmp_path, "gemma4_text", layers=3, **INPUTS), draw_batches()
    with LayerStream(folder, device=CPU) as stream, torch.no_grad():
        tokens, passes = TokenStream(stream, batches), []
        monkeypatch.setattr(stream, "_pass", lambda ids_BT: passes.append(ids_BT) or LayerStream._pass(stream, ids_BT))
        for layer in stream.layers():
            tokens.enter(layer)
            tokens.leave(map(layer.ffn, tokens.inputs))
    assert len(passes) == 3 * (len(batches) + 1)  # one shows whether the layer is plain


def test_an_activation_that_learns_serves_whoever_keeps_the_ffn(tmp_path: Path):
    with LayerStream(write_checkpoint("apertus", tmp_path), device=torch.device("cpu")) as stream:
        ffns = [layer.ffn for layer in stream.layers()]
    assert all(ffn(torch.randn(3, ffn.down_DF.shape[0])).isfinite().all() for ffn in ffns)


def test_only_one_layer_is_in_memory(tmp_path: Path):
    folder = write_pico(tmp_path, "llama", layers=3)
    with LayerStream(folder, device=CPU) as stream:
        modules, ffns = [], []
        for layer in stream.layers():
            modules.append(layer._module)
            ffns.append(weakref.ref(layer.ffn))
            only_the_last = [False] * (len(modules) - 1) + [True]
            assert [any(not p.is_meta for p in module.parameters()) for module in modules] == only_the_last
            assert [ffn() is not None for ffn in ffns] == only_the_last


@pytest.mark.parametrize("target", ["tiny_onn", "glm4_moe"])
def test_an_own_head_of_a_tied_model_is_used_as_transformers_does(target, tmp_path: Path):
    """A fine-tuning of the head alone leaves such files."""
    folder = write_pico(tmp_path / "dense", "qwen3", layers=1, tie=True)
    with edited_tensors(folder) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    with DenseReader(folder) as reader:
        emit_checkpoint(
            folder, tmp_path / "moe", target=MOE_TARGETS[target], shape=MoEShape(5, 8, 5, 0),
            routers=lambda _layer: torch.zeros(5, 24),
            experts=lambda layer: slice_experts(
                reader.projections(layer), torch.arange(40).view(5, 8), torch.arange(0)
            ),
        )  # fmt: skip
    batches = draw_batches((9,))
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=remote).eval()
        for path, remote in ((folder, False), (tmp_path / "moe", target == "tiny_onn"))
    ]
    with LayerStream(folder, device=CPU) as stream, torch.no_grad():
        wanted, carved = (model(batches[0].input_ids).logits for model in models)
        tokens = TokenStream(stream, batches)
        for layer in stream.layers():
            tokens.enter(layer)
            tokens.leave(map(layer.ffn, tokens.inputs))
        streamed = stream.head()(tokens.passages[0])
    torch.testing.assert_close(streamed, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(carved, wanted, rtol=1e-5, atol=1e-5)
