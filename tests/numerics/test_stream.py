"""The layer stream against the whole model run by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.errors import ConfigError
from models.pico import write_pico
from models.stream import LayerStream
from stages.calibration.token_stream import TokenStream
from stages.data.batches import batch_sequences
from stages.data.sequences import TokenSequence
from stages.evaluate.native import measure_loss

CPU = torch.device("cpu")


def draw_batches(lengths=(9, 5, 7), batch_tokens=18):
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for index, length in enumerate(lengths):
        ids = torch.randint(1, 61, (length,), generator=generator).tolist()
        sequences.append(TokenSequence(f"sample {index}", ids, [-100, -100, *ids[2:]] if index else ids))
    return batch_sequences(sequences, batch_tokens, 0)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_dense_stream_is_the_model(model_type, tie, tmp_path: Path):
    folder = write_pico(tmp_path, model_type, layers=3, tie=tie)
    batches = draw_batches()
    with LayerStream(folder, device=CPU) as stream, torch.no_grad():
        tokens = TokenStream(stream, batches)
        for layer in stream.layers():
            tokens.enter(layer)
            tokens.leave(map(layer.ffn, tokens.inputs))
        streamed = tokens.loss(stream, batches)
        logits = stream.head()(tokens.hidden[0])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        whole = model(input_ids=batches[0].input_ids, attention_mask=batches[0].attention_mask).logits
    mask_BT = batches[0].attention_mask.bool()
    assert not mask_BT.all(), "the batch should hold padding"
    torch.testing.assert_close(logits[mask_BT], whole[mask_BT], rtol=1e-5, atol=1e-5)
    expected = measure_loss(model, batches, "dense")
    assert streamed.tokens == expected.tokens == 8 + 3 + 5
    assert streamed.nats == pytest.approx(expected.nats, abs=1e-6)


def test_a_sequence_beyond_the_attention_window_is_refused(tmp_path: Path):
    folder = write_pico(tmp_path, "mistral", sliding_window=8)
    with LayerStream(folder, device=CPU) as stream, pytest.raises(ConfigError) as caught:
        TokenStream(stream, draw_batches())
    assert str(caught.value) == (
        "sequences of 9 tokens are longer than the model's attention window of 8\n"
        "  where: data.max_length\n"
        "  do:    data.max_length=8"
    )


def test_only_one_layer_is_in_memory(tmp_path: Path):
    folder = write_pico(tmp_path, "llama", layers=3)
    with LayerStream(folder, device=CPU) as stream:
        modules = []
        for layer in stream.layers():
            modules.append(layer._module)
            held = [any(not p.is_meta for p in module.parameters()) for module in modules]
            assert held == [False] * (len(modules) - 1) + [True]
