import pytest
import torch
from torch import nn

from instruments.errors import ConfigError
from instruments.parameter_scan.call import bind_arguments, read_call

IDS = torch.ones(2, 5, dtype=torch.long)


def test_positional_arguments_get_their_names():
    class Model(nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return input_ids

    assert set(bind_arguments(Model(), (IDS, IDS), {"labels": None})) == {"input_ids", "attention_mask", "labels"}


def test_padding_and_supervised_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]])  # the KV cache holds two earlier positions
    labels = torch.tensor([[7, -100, -100, -100, -100], [7, 7, -100, 7, -100]])
    facts = read_call({"input_ids": IDS, "attention_mask": mask, "labels": labels})
    assert (facts.samples, facts.length) == (2, 5)
    assert facts.mask_BT.tolist() == [[True, True, True, True, False], [False, True, True, True, True]]
    assert facts.supervised_B.tolist() == [0, 2]  # shifting removes the first label


def test_labels_shifted_by_the_caller():
    labels = torch.tensor([[7, -100, -100, -100, -100], [-100] * 5])
    facts = read_call({"inputs_embeds": torch.ones(2, 5, 3), "labels": IDS, "shift_labels": labels})
    assert facts.supervised_B.tolist() == [1, 0]


def test_unknown_labels_and_no_mask():
    facts = read_call({"input_ids": IDS, "labels": torch.tensor([0, 1])})  # labels of a classifier
    assert facts.mask_BT is None
    assert facts.supervised_B is None


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (torch.ones(2, 1, 5, 5), "of shape (2, 1, 5, 5)"),
        (torch.ones(2, 4), "of shape (2, 4)"),
        ({"full_attention": None}, "a dict"),
    ],
)
def test_a_mask_that_says_nothing_about_padding(mask, found):
    with pytest.raises(ConfigError) as caught:
        read_call({"input_ids": IDS, "attention_mask": mask})
    assert str(caught.value) == (
        f"attention_mask is {found}; the scanner reads padding from a mask of shape (2, 5)\n"
        "  where: ParameterTensorScanner\n"
        "  do:    pass the tokenizer's attention_mask, or none for samples without padding"
    )


def test_a_call_without_samples():
    with pytest.raises(ConfigError) as caught:
        read_call({"pixel_values": IDS})
    assert str(caught.value) == (
        "the model was called with pixel_values; its samples are unknown\n"
        "  where: ParameterTensorScanner\n"
        "  do:    call the scanned model with input_ids=... or inputs_embeds=..."
    )
