"""auto_diff on models that were not prepared for it; each case has a healthy twin."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from instruments.precision.verdict import DiffLimits, Verdict
from tiny_onn import auto_diff

B, T, D, F = 3, 7, 48, 80


def sample(seed=1):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Residual blocks after an embedding with this mean, which LayerNorm removes."""

    def __init__(self, mean):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.lines = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.last, self.head = nn.LayerNorm(D), nn.Linear(D, 5)
        nn.init.constant_(self.embed.bias, mean)

    def forward(self, x):
        x = self.embed(x)
        for norm, line in zip(self.norms, self.lines, strict=True):
            x = x + line(norm(x))
        return self.head(self.last(x))


def test_an_output_that_is_lost_is_severe_however_much_the_model_amplifies():
    diff = auto_diff(Residual(1000.0), sample(), precision=torch.bfloat16)
    assert diff.precision == "bfloat16"
    end = diff.outputs[-1]
    assert end.propagated.normalised_l2 > 0.3
    assert end.propagated.normalised_l2 < 2 * end.propagated_floor  # relative to the error floor alone it would be ok
    assert diff.verdict is end.bound_verdict is Verdict.SEVERE
    assert diff.jump.name == diff.first.name == "norms.0"
    healthy = auto_diff(Residual(0.0), sample())
    assert healthy.verdict is Verdict.OK, str(healthy)
    assert healthy.jump is None


def test_limits_of_the_output_can_be_set():
    model = Residual(30.0)  # an output error of a few percent
    assert auto_diff(model, sample()).verdict is Verdict.WARNING
    assert auto_diff(model, sample(), limits=DiffLimits(output_warning=0.3, output_severe=0.5)).verdict is Verdict.OK
    # The model's output is judged even if only other modules are selected.
    assert auto_diff(Residual(1000.0), sample(), modules=["embed"]).verdict is Verdict.SEVERE


class InPlace(nn.Module):
    """Writes into its input, into a list argument and into buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("late", None)

    def forward(self, parts):
        x = parts.pop()
        x.mul_(3.0)
        self.calls += 1
        self.mean = 0.5 * self.mean + x.mean((0, 1))
        self.late = self.mean
        return self.line(x) * self.calls + self.mean


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_the_sample_and_the_buffers_are_left_as_they_were(mode):
    model, x = InPlace(), sample()
    before, parts, mean = x.clone(), [x], model.mean
    model.calls += 4
    diff = auto_diff(model, {"parts": parts}, mode=mode)
    assert diff.verdict is Verdict.OK, str(diff)
    assert parts == [x]
    assert torch.equal(x, before)
    assert (int(model.calls), model.mean is mean, model.late) == (4, True, None)
    assert not mean.any()


@dataclass(frozen=True)
class Given:
    x: Tensor
    names: tuple


@dataclass
class Made:
    logits: Tensor
    hidden: list


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(D, 5)

    def forward(self, given):
        logits = self.line(given.x)
        return Made(logits * 100, [given.x, logits])


class Dataclasses(nn.Module):
    def __init__(self, *, broken):
        super().__init__()
        self.inner, self.broken = Inner(), broken

    def forward(self, given):
        made = self.inner(given)
        return Made(made.logits * 1e3 if self.broken else made.logits, made.hidden)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_dataclasses_are_looked_into(mode):
    given = Given(sample(), ("a",))
    diff = auto_diff(Dataclasses(broken=False), (given,), precision="fp16", mode=mode)
    assert diff.verdict is Verdict.OK, str(diff)
    names = [output.name for output in diff.outputs]
    assert names[1:] == [
        f"{call}.{path}" for call in ("inner", "(model)") for path in ("logits", "hidden[0]", "hidden[1]")
    ]
    broken = auto_diff(Dataclasses(broken=True), (given,), precision="fp16", mode=mode)
    assert (broken.verdict, broken.first.name) == (Verdict.SEVERE, "(model).logits")


class Between(nn.Module):
    """A product between two Linear layers; with a large `factor` it overflows in fp16."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(D, F), nn.Linear(F, D), factor

    def forward(self, x):
        return self.second(self.first(x) * self.factor) / self.factor


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_an_overflow_between_modules_is_not_blamed_on_the_next_one(mode):
    for factor, expected in ((1e5, {"0", "(model)"}), (10.0, set())):
        torch.manual_seed(0)
        diff = auto_diff(nn.Sequential(Between(factor), nn.Linear(D, 5)), sample(), precision="fp16", mode=mode)
        assert {one.name for one in diff.outputs if one.own_verdict is not Verdict.OK} <= expected
        assert diff.first is None or diff.first.name == "0"
        assert diff.verdict is (Verdict.SEVERE if expected else Verdict.OK)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x.float())


class Modulus(nn.Module):
    def forward(self, x):
        return x.abs()


def test_complex_outputs_are_compared_as_pairs():
    diff = auto_diff(nn.Sequential(nn.Linear(D, D), Spectrum(), Modulus()), sample())
    found = next(one for one in diff.outputs if one.name == "1")
    assert found.shape == (B, T, D // 2 + 1, 2)
    assert 0 < found.propagated.normalised_l2 < found.propagated_floor
    assert diff.verdict is Verdict.OK


def test_the_low_precision_model_keeps_its_mode():
    model = nn.Sequential(nn.Linear(D, F), nn.Dropout(), nn.Linear(F, 5))
    low = copy.deepcopy(model).bfloat16().train()
    assert auto_diff(model, sample(), mode="cast", low=low).verdict is Verdict.OK
    assert low.training
    assert low[1].training


def test_the_module_inside_another_is_named_where_its_neighbour_adds_to_the_floor():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    for mean, jump in ((300.0, "1"), (0.0, None)):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Conv2d(8, 4, 3))
        with torch.no_grad():
            weight = model[0].weight.add_(0.3)
            weight -= 0.97 * weight.mean((1, 2, 3), keepdim=True)  # a small mean of large addends
            model(images + mean)
        diff = auto_diff(model, images + mean)
        assert (diff.jump and diff.jump.name) == jump
    diff = auto_diff(Residual(1000.0), sample(), modules=["norms.0"])
    assert diff.first.name == "norms.0"


class Add(nn.Module):
    def forward(self, x):
        total = x
        for _ in range(90):
            total = total + x.abs()
        return total


def test_values_that_are_not_finite_come_before_warnings():
    for bias, first in ((7e4, "1"), (7.0, "0")):
        torch.manual_seed(0)
        model = nn.Sequential(Add(), nn.Linear(D, D))
        nn.init.constant_(model[1].bias, bias)
        diff = auto_diff(model, sample(), precision=torch.float16, mode="cast")
        assert diff.first.name == first
        assert diff.outputs[0].own_verdict is Verdict.WARNING
        assert ("values are not finite" in str(diff)) == (bias == 7e4)
