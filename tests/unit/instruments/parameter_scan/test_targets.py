import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from instruments.errors import ConfigError
from instruments.parameter_scan.file_format import WatchedParameter
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.targets import Selection


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 12)
        self.router = nn.Linear(6, 3)


class Model(nn.Module):
    def __init__(self, embedding=nn.Embedding):
        super().__init__()
        self.embed_tokens = embedding(11, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 11, bias=False)

    def get_input_embeddings(self):
        return self.embed_tokens


def names(targets):
    return [target.parameter.name for target in targets.targets]


def test_every_linear_and_embedding_by_default():
    found = Selection(Model(), None, 5)
    layers = [f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("q_proj", "router")]
    assert names(found) == ["embed_tokens.weight", *layers, "lm_head.weight"]
    assert found.left_out == {}
    assert names(Selection(Model(), ["*.1.*", "lm_*"], 5)) == [*layers[2:], "lm_head.weight"]
    targets = found.targets
    assert targets[0].parameter == WatchedParameter("embed_tokens.weight", "embedding", 11, 6, 5)
    assert targets[1].parameter == WatchedParameter("layers.0.q_proj.weight", "linear", 6, 12, 5)
    assert targets[0].head is None


def test_names_are_those_of_the_model_inside_its_wrappers():
    model, found = Model(), names(Selection(Model(), None, 5))
    model.layers[1] = CheckpointWrapper(model.layers[1])
    compiled = torch.compile(model, backend="eager")
    for wrapped in (model, nn.DataParallel(model), compiled, nn.DataParallel(compiled)):
        assert names(Selection(wrapped, None, 5)) == found
    model.extra = nn.Parameter(torch.ones(2, 3))
    assert Selection(nn.DataParallel(model), None, 5).left_out.keys() == {"extra"}
    named = nn.ModuleDict({"module": nn.Linear(2, 3), "other": nn.ModuleDict({"module": nn.Linear(2, 3)})})
    assert names(Selection(named, None, 5)) == ["module.weight", "other.module.weight"]


def test_a_tied_output_embedding_belongs_to_the_embedding():
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    found = Selection(model, ["embed_tokens", "lm_head"], 5)
    assert names(found) == ["embed_tokens.weight"]
    assert found.targets[0].head is model.lm_head


def test_two_linears_with_one_weight_are_left_out():
    model = Model()
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    found = Selection(model, None, 5)
    assert set(found.left_out) == {"layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    assert not {name for name in names(found) if "q_proj" in name}
    with pytest.raises(ConfigError):
        ParameterTensorScanner(model, patterns=["*.q_proj"])


@pytest.mark.parametrize(
    ("model", "settings", "setting"),
    [
        (Model(), {"patterns": ["*.query"]}, "patterns="),
        (nn.Sequential(nn.ReLU()), {}, "patterns="),
        (Model(), {"block_width": 0}, "block_width=0"),
        (Model(), {"every_steps": 0}, "every_steps=0"),
    ],
)
def test_settings_without_meaning_are_refused(model, settings, setting):
    with pytest.raises(ConfigError, match=setting):
        ParameterTensorScanner(model, **settings)
