import pytest
import torch
from torch import nn

from instruments.errors import ConfigError
from instruments.parameter_scan.passes import CallFacts, bind_arguments, read_call

IDS = torch.ones(2, 5, dtype=torch.long)


def test_positional_arguments_get_their_names_and_an_encoder_decoder_is_refused():
    class Model(nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return input_ids

    class Both(nn.Module):
        def forward(self, input_ids, decoder_input_ids=None, labels=None):
            return input_ids

    assert set(bind_arguments(Model(), (IDS, IDS), {"labels": None})) == {"input_ids", "attention_mask", "labels"}
    with pytest.raises(ConfigError):
        bind_arguments(Both(), (), {"input_ids": IDS, "labels": IDS})


def test_padding_and_supervised_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]])  # the KV cache holds two earlier positions
    labels = torch.tensor([[7, -100, -100, -100, -100], [7, 7, -100, 7, -100]])
    facts = read_call({"input_ids": IDS, "attention_mask": mask, "labels": labels})
    assert (facts.samples, facts.length) == (2, 5)
    assert facts.mask_BT.tolist() == [[True, True, True, True, False], [False, True, True, True, True]]
    assert facts.supervised_B.tolist() == [0, 2]  # shifting removes the first label
    shifted = read_call({"inputs_embeds": torch.ones(2, 5, 3), "labels": IDS, "shift_labels": labels})
    assert shifted.supervised_B.tolist() == [1, 3]
    unknown = read_call({"input_ids": IDS, "labels": torch.tensor([0, 1])})  # labels of a classifier
    assert (unknown.mask_BT, unknown.supervised_B) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 4)}, "attention_mask"),
        ({"input_ids": IDS, "attention_mask": {"full_attention": None}}, "attention_mask"),
        ({"pixel_values": "a"}, "pixel_values"),
    ],
)
def test_a_call_whose_samples_or_padding_are_unknown_is_refused(arguments, name):
    with pytest.raises(ConfigError, match=name):
        read_call(arguments)


def test_an_input_with_all_tokens_in_a_row_is_split_by_samples():
    flat, facts = torch.arange(12.0).view(6, 2), CallFacts(2, 3, None, None)
    assert torch.equal(facts.split(flat), flat.view(2, 3, 2))
    assert facts.split(flat[:5]) is None
