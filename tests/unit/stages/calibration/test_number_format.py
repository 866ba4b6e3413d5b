from types import SimpleNamespace

import pytest
import torch
from pico_moes import make_moe

from instruments.errors import NumericsError
from models.config import ModelConfig
from models.loading import is_offloaded
from stages.calibration import number_format
from stages.calibration.number_format import check_number_format
from stages.losses import measure_loss
from stages.text.batches import TokenSequence, batch_sequences

SEQUENCES = [TokenSequence(str(n), list(range(n, n + 8)), list(range(n, n + 8))) for n in range(9)]
TEXT, CPU = batch_sequences(SEQUENCES, 24, 0), ModelConfig(device="cpu")


def write(folder, dtype, *, loud=False):
    """A MoE; a `loud` one has hidden states that float16 cannot hold."""
    torch.manual_seed(0)
    model = make_moe("qwen3_moe")
    if loud:
        embedding = model.get_input_embeddings().weight
        embedding.data = 6.5e4 * embedding.data.sign()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 2.0**17
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "loud"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)])
def test_a_checkpoint_that_works_in_its_format_is_accepted(tmp_path, dtype, loud):
    check_number_format(write(tmp_path, dtype, loud=loud), dtype, TEXT, CPU, tmp_path)


def test_a_checkpoint_that_overflows_is_refused_with_a_format_that_works(tmp_path):
    folder = write(tmp_path, torch.float16, loud=True)
    with pytest.raises(NumericsError) as caught:
        check_number_format(folder, torch.float16, TEXT, CPU, tmp_path)
    assert caught.value.do == "assemble.dtype=bfloat16"
    assert caught.value.where == "24 tokens of validation text"


def test_a_finite_loss_that_is_much_higher_is_refused(tmp_path, monkeypatch):
    losses = iter([2.0, 2.06])
    monkeypatch.setattr(number_format, "measure_loss", lambda *_: SimpleNamespace(nats=next(losses)))
    with pytest.raises(NumericsError, match=r"2.0600 in bfloat16 and of 2.0000 in float32") as caught:
        check_number_format(write(tmp_path, torch.bfloat16), torch.bfloat16, TEXT, CPU, tmp_path)
    assert caught.value.do == "assemble.dtype=float32"


def test_a_model_that_is_not_finite_in_float32_is_not_blamed_on_its_format(tmp_path, monkeypatch):
    monkeypatch.setattr(number_format, "measure_loss", lambda *_: SimpleNamespace(nats=float("nan")))
    with pytest.raises(NumericsError, match="the carved model has a loss of nan"):
        check_number_format(write(tmp_path, torch.bfloat16), torch.bfloat16, TEXT, CPU, tmp_path)


def test_float32_needs_no_pass(tmp_path):
    check_number_format(tmp_path, torch.float32, TEXT, CPU, tmp_path)


def test_weights_that_do_not_fit_are_on_disk(tmp_path, monkeypatch):
    folder, found = write(tmp_path / "moe", torch.bfloat16), []

    def measure(model, batches):
        found.append((is_offloaded(model), loss := measure_loss(model, batches)))
        return loss

    monkeypatch.setattr(number_format, "measure_loss", measure)
    for free in (2**40, 10_000):
        monkeypatch.setattr(number_format, "free_memory", lambda free=free: free)
        check_number_format(folder, torch.bfloat16, TEXT, CPU, tmp_path)
    offloaded, losses = zip(*found, strict=True)
    assert offloaded == (False, False, True, True)
    assert losses[:2] == losses[2:]
    assert [*tmp_path.iterdir()] == [folder]
