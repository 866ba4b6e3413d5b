from types import SimpleNamespace

import pytest
import torch
from pico_moes import MOES, make_moe

from instruments.errors import NumericsError
from models.loading import load_whole
from stages.calibration import number_format
from stages.calibration.number_format import check_number_format, has_room, open_by_layers
from stages.losses import measure_loss
from stages.text.batches import TokenSequence, batch_sequences

SEQUENCES = [TokenSequence(str(n), list(range(n, n + 8)), list(range(n, n + 8))) for n in range(9)]
TEXT, CPU = batch_sequences(SEQUENCES, 24, 0), torch.device("cpu")


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
    check_number_format(write(tmp_path, dtype, loud=loud), dtype, TEXT, CPU)


def test_a_checkpoint_that_overflows_is_refused_with_a_format_that_works(tmp_path):
    folder = write(tmp_path, torch.float16, loud=True)
    with pytest.raises(NumericsError) as caught:
        check_number_format(folder, torch.float16, TEXT, CPU)
    assert caught.value.do == "assemble.dtype=bfloat16"
    assert caught.value.where == "24 tokens of validation text"


def test_a_finite_loss_that_is_much_higher_is_refused(tmp_path, monkeypatch):
    losses = iter([2.0, 2.06])
    monkeypatch.setattr(number_format, "measure_loss", lambda *_: SimpleNamespace(nats=next(losses)))
    with pytest.raises(NumericsError, match=r"2.0600 in bfloat16 and of 2.0000 in float32") as caught:
        check_number_format(write(tmp_path, torch.bfloat16), torch.bfloat16, TEXT, CPU)
    assert caught.value.do == "assemble.dtype=float32"


def test_a_model_that_is_not_finite_in_float32_is_not_blamed_on_its_format(tmp_path, monkeypatch):
    monkeypatch.setattr(number_format, "measure_loss", lambda *_: SimpleNamespace(nats=float("nan")))
    with pytest.raises(NumericsError, match="the carved model has a loss of nan"):
        check_number_format(write(tmp_path, torch.bfloat16), torch.bfloat16, TEXT, CPU)


def test_float32_needs_no_pass(tmp_path):
    check_number_format(tmp_path, torch.float32, TEXT, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", MOES)
def test_a_model_with_one_layer_in_memory_has_the_loss_of_the_whole_one(tmp_path, model_type, dtype):
    torch.manual_seed(0)
    make_moe(model_type).to(torch.bfloat16).save_pretrained(tmp_path)
    whole = load_whole(tmp_path, dtype=dtype, experts_implementation="grouped_mm")
    loaded = []

    def note(_layer, _inputs, _output):
        loaded.append([all(p.device.type != "meta" for p in layer.parameters()) for layer in layers])

    with open_by_layers(tmp_path, dtype, CPU) as streamed:
        layers = streamed.get_decoder().layers
        for layer in layers:
            layer.register_forward_hook(note, prepend=True)
        assert measure_loss(streamed, TEXT[:1]) == measure_loss(whole, TEXT[:1])
    assert loaded == [[True, False], [False, True]]


@pytest.mark.parametrize("model_type", MOES)
def test_weights_that_were_kept_in_float32_are_those_of_the_checkpoint_in_its_own_format(tmp_path, model_type):
    torch.manual_seed(0)
    make_moe(model_type).to(torch.bfloat16).save_pretrained(tmp_path)
    kept, dtypes = {}, (torch.float32, torch.bfloat16)
    losses, layers = [], []
    for dtype in dtypes:
        with open_by_layers(tmp_path, dtype, CPU, kept) as streamed:
            losses.append(measure_loss(streamed, TEXT[:1]))
            layers.append(len(kept))
    wholes = (load_whole(tmp_path, dtype=dtype, experts_implementation="grouped_mm") for dtype in dtypes)
    assert losses == [measure_loss(whole, TEXT[:1]) for whole in wholes]
    assert layers == [2, 0]


def test_weights_are_kept_where_they_take_less_than_a_quarter_of_the_memory(tmp_path, monkeypatch):
    size = sum(path.stat().st_size for path in write(tmp_path, torch.bfloat16).glob("*.safetensors"))
    for free, room in ((8 * size + 1, True), (8 * size, False), (None, False)):
        monkeypatch.setattr(number_format, "free_memory", lambda free=free: free)
        assert has_room(tmp_path, torch.bfloat16, CPU) is room
