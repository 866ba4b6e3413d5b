import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM

from models.config import ModelConfig
from models.stream import LayerStream
from stages.artifacts.job import ALONE, Job
from stages.calibration.batches import CalibrationContext, deal_layers
from stages.calibration.config import VocabularyConfig
from stages.cluster.stage import open_activities
from stages.text.batches import TokenBatch
from stages.text.config import DataConfig

L, D, F, V = 3, 24, 40, 61


class Batches:
    """Two batches of different lengths; the second is padded."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(V, shape, generator=generator) for shape in ((2, 7), (3, 5))]
        self.masks = [torch.ones(2, 7).long(), torch.ones(3, 5).long()]
        self.masks[1][0, 3:] = 0

    def tokens(self):
        return [
            TokenBatch(ids_BT, mask_BT, ids_BT, [f"{row}" for row in range(len(ids_BT))])
            for ids_BT, mask_BT in zip(self.ids, self.masks, strict=True)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("pico"), "llama", layers=L, hidden=D, intermediate=F, vocab=V)


def test_activities_are_those_of_the_model(folder):
    """The reference for neuron activations is the input of down_proj in transformers."""
    batches = Batches()
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen = [[] for _ in range(L)]
    for layer, module in enumerate(model.model.layers):
        module.mlp.down_proj.register_forward_pre_hook(lambda _module, args, layer=layer: seen[layer].append(args[0]))
    with torch.no_grad():
        for ids_BT, mask_BT in zip(batches.ids, batches.masks, strict=True):
            model(ids_BT, attention_mask=mask_BT)
    layers = 0
    with LayerStream(folder, device=torch.device("cpu")) as stream:
        for layer, activity in enumerate(deal_layers(stream, batches.tokens(), ALONE)):
            layers += 1
            assert [tuple(x_TD.shape) for x_TD in activity.inputs] == [(14, D), (13, D)]
            for x_TD, seen_BTF, mask_BT in zip(activity.inputs, seen[layer], batches.masks, strict=True):
                torch.testing.assert_close(activity.ffn.hidden(x_TD), seen_BTF[mask_BT.bool()], rtol=1e-4, atol=1e-5)
    assert layers == L


def test_the_pass_reads_the_calibration_text(tmp_path):
    folder = write_pico(tmp_path / "pico", "qwen3", layers=L, hidden=D, intermediate=F, tokenizer=True)
    data = DataConfig(tokens=96, max_length=32)
    model, job = ModelConfig(kind="local", path=str(folder), device="cpu"), Job({}, tmp_path, tmp_path)

    def read(vocabulary, layers=None, tokens=200):
        context = CalibrationContext.of(model, data, VocabularyConfig(vocabulary, layers), 64, 0, job)
        return [(len(x_TD), ffn.width) for ffn, x_TD in open_activities(context, tokens)]

    assert read(0) == [(96, F)] * L
    assert read(40, 2) == [(96 + 40, F), (96 + 40, F), (96, F)]
    assert read(0, tokens=50) == [(50, F)] * L
