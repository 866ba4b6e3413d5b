"""The scanner on models that are not of text: norms are those of autograd, sample by sample."""

import pytest
import torch
from torch import nn

from instruments.errors import ConfigError, NumericsError
from instruments.parameter_scan.scanner import ParameterTensorScanner

B, T, D, F, H = 3, 7, 6, 11, 5


class Patches(nn.Module):
    """Images (B, 2, 8, 8) in 16 patches; a Linear over patches (B, 4, 4, 8), and one over their mean (B, F)."""

    def __init__(self):
        super().__init__()
        self.cut, self.up, self.head = nn.Conv2d(2, 8, 2, 2), nn.Linear(8, F), nn.Linear(F, H)

    def forward(self, x):
        return self.head(self.up(self.cut(x).permute(0, 2, 3, 1)).tanh().mean((1, 2)))


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, time, series):
        return self.down(self.up(series).relu()) * time


class Parts(nn.Module):
    """Takes its tensors in a dict and by any name."""

    def __init__(self):
        super().__init__()
        self.kinds, self.line = nn.Embedding(9, D), nn.Linear(D, H)

    def forward(self, *batch):
        return self.line(self.kinds(batch[0]["nodes"]))


CASES = {
    "MLP": (lambda: nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, H)), (torch.randn(B, D),), None),
    "image": (Patches, (torch.randn(B, 2, 8, 8),), None),
    "series": (Series, (torch.tensor(0.5), torch.randn(B, T, D)), None),
    "named": (Series, (torch.rand(1, 1, 1), torch.randn(B, T, D)), "series"),
    "dict": (Parts, ({"nodes": torch.randint(9, (B, T))},), None),
}


@pytest.mark.parametrize("case", CASES)
def test_norms_are_those_of_each_sample_alone(case):
    make, arguments, samples = CASES[case]
    torch.manual_seed(0)
    model = make()
    with ParameterTensorScanner(model, samples=samples) as scanner:
        output = model(*arguments)
        output.square().sum().backward()
    (record,) = scanner.collect()
    assert set(scanner.left_out) == ({"cut.weight"} if case == "image" else set())  # no Linear
    assert [one.name for one in scanner.parameters] == [
        f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Embedding)
    ]
    for sample in range(B):
        model.zero_grad()
        model(*arguments)[sample].square().sum().backward()
        expected = [model.get_parameter(one.name).grad.norm().item() for one in scanner.parameters]
        assert record.gradient_BP[sample].tolist() == pytest.approx(expected, rel=1e-4)


class Captions(nn.Module):
    """Text (B, T), with B images of 4 patches; logits of the last 5 positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.vision, self.head = nn.Embedding(9, D), nn.Linear(F, D), nn.Linear(D, 9)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask, patches):
        self.last = (self.embed(input_ids) + self.vision(patches).mean(1, keepdim=True))[:, -5:]
        return self.head(self.last)


def test_with_padding_only_the_output_embedding_may_have_fewer_positions_than_the_text():
    model, mask = Captions(), torch.tensor([[1] * T, [1] * 4 + [0] * 3, [1] * 3 + [0] * 4])
    with ParameterTensorScanner(model) as scanner:
        logits = model(torch.randint(9, (B, T)), mask, torch.randn(B, 4, F))
        (logits.square().sum(-1) * mask[:, -5:]).sum().backward()
    assert scanner.left_out == {"vision.weight": "it has other positions than the text"}
    (record,) = scanner.collect()
    tokens = model.last * mask[:, -5:, None]
    torch.testing.assert_close(record.activation_BP[:, 2], tokens.flatten(1).norm(dim=1))


def test_layers_whose_samples_are_ambiguous_are_left_out_and_no_tensor_is_refused():
    model = nn.Sequential(nn.Linear(D, F), nn.Linear(F, H))
    with pytest.raises(NumericsError), ParameterTensorScanner(model) as scanner:
        model(torch.randn(B, B, D)).sum().backward()  # samples first or positions first
    assert scanner.left_out == {f"{place}.weight": "its samples cannot be separated" for place in range(2)}
    with ParameterTensorScanner(Series(), samples="steps") as scanner, pytest.raises(ConfigError):
        scanner._model(torch.tensor(0.5), torch.randn(B, T, D))
