"""`watch_model` in other loops and models: several optimizers, errors, masks, scripted parts, a second watch."""

import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from unit.instruments.precision.watched_net import D, H, Net, T, V, batch

from instruments.errors import ContractError
from instruments.precision import watch_model
from instruments.training_watch.step_log import read_step_log


def train(model, steps):
    """A training loop without any call of the watch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def norm_of(*modules):
    return nn.utils.get_total_norm([p.grad for module in modules for p in module.parameters()]).item()


def test_two_optimizers_of_one_backward_pass_share_a_step_and_see_norms_before_clipping(caplog):
    model = Net()
    model.norm.weight.register_hook(lambda grad: grad * 1e-9)
    model.norm.bias.register_hook(lambda grad: grad * 1e-9)
    body, head = nn.ModuleList([model.first, model.norm, model.middle]), model.head
    optimizers = [torch.optim.SGD(body.parameters(), 0.01), torch.optim.AdamW(head.parameters(), 0.01)]
    with watch_model(model) as watch:
        for step in range(4):
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            norms = norm_of(body), norm_of(head)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer, norm in zip(optimizers, norms, strict=True):
                optimizer.step()
                assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
                assert watch.last.step == step
                assert "head" in watch.last.outputs
            model.zero_grad()
    (message,) = caplog.messages
    assert message.startswith("step 2: no gradient to speak of in norm: ")


def test_a_generator_is_compared_with_its_own_earlier_steps(caplog):
    torch.manual_seed(0)
    generator, critic = nn.Linear(D, H), nn.Linear(H, 1)
    both = nn.ModuleDict({"generator": generator, "critic": critic})  # is never called itself
    optimizers = [torch.optim.SGD(part.parameters(), 1e-6) for part in (generator, critic)]
    with watch_model(both) as watch:
        for step in range(4):
            for scale, times, part, optimizer in ((0.1, 5, critic, optimizers[1]), (-1e3, 1, generator, optimizers[0])):
                for _ in range(times):
                    (scale * critic(generator(batch(step)[0])).mean()).backward()
                    norm = norm_of(part)
                    nn.utils.clip_grad_norm_(both.parameters(), 1e-3)
                    optimizer.step()
                    assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
                    both.zero_grad()
            assert watch.next_step == 5 * step + 5 + (step == 0)
    assert [message.partition(": its")[0] for message in caplog.messages] == []


class Fields(dict):
    """Outputs of a model; pytree does not look inside."""


class Odd(Net):
    def forward(self, x):
        return Fields(scores=super().forward(x))

    def training_step(self, x):
        return super().forward(x)


@pytest.mark.parametrize("how", ["after an error", "dict", "training_step"])
def test_every_backward_pass_is_noticed(how):
    model = Odd()
    optimizer, broken = torch.optim.SGD(model.parameters(), 0.01), [True] * (how == "after an error")

    def fail(_grad):
        if broken:
            broken.clear()
            raise RuntimeError("out of memory")

    model.middle.weight.register_hook(fail)
    with watch_model(model) as watch:
        if broken:
            with pytest.raises(RuntimeError, match="out of memory"):
                model.training_step(batch(0)[0]).sum().backward()
            optimizer.zero_grad()
        for step in range(2):
            scores = model(batch(step)[0])["scores"] if how == "dict" else model.training_step(batch(step)[0])
            functional.cross_entropy(scores, batch(step)[1]).backward()
            norm = norm_of(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
            optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wide_and_complex_parameters(dtype):
    model = nn.Sequential(nn.Linear(D, H, dtype=dtype), nn.Linear(H, V, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_model(model) as watch:
        model(batch(0)[0].to(dtype)).abs().square().mean().backward()
        optimizer.step()
    assert watch.last.gradient_norm == pytest.approx(norm_of(model), rel=1e-6)
    assert watch.last.outputs.keys() == {"0", "1"}
    assert watch.last.anomalies == ()


def test_parameters_are_watched_from_the_step_on_at_which_they_are_unfrozen():
    model = Net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_model(model) as watch:
        for step in range(4):
            model.first.requires_grad_(step >= 2)
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            norm = norm_of(*[part for name, part in model.named_children() if step >= 2 or name != "first"])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            assert ("first" in watch.last.layers) == (step >= 2)
            assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
            optimizer.zero_grad()


class Attention(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(H, 1, batch_first=True)

    def forward(self, x):
        h = self.first(x)[None]
        return self.head(self.middle(self.norm(self.attention(h, h, h)[0])))[0]


@pytest.mark.parametrize("name", ["attention", "middle"])
def test_modules_that_use_weights_of_submodules_are_found(name):
    model = Attention()
    if name == "middle":
        nn.utils.parametrizations.weight_norm(model.middle)
        model.middle.bias.data[0] = math.nan
    else:
        model.attention.in_proj_bias.data[0] = math.nan
    with watch_model(model) as watch:
        train(model, 1)
    assert watch.last.anomalies[0].where[0] == name


class Masked(Net):
    """Adds a causal mask, made by a module, to the scores of an attention."""

    def __init__(self, fill):
        super().__init__()
        self.mask = nn.Identity()
        self.fill = fill

    def forward(self, x):
        mask = self.mask(torch.full((T, T), self.fill).triu(1))
        h = self.first(x)
        return self.head(self.middle((h @ h.mT / 9 + mask).softmax(-1) @ self.norm(h)))


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_is_no_finding_and_hides_none(fill, caplog):
    model = Masked(fill)
    with watch_model(model) as watch:
        train(model, 2)
        assert caplog.messages == []
        model.middle.weight.data[0, 0] = math.nan
        train(model, 1)
    assert watch.last.anomalies[0].where[0] == "middle"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_left_out_and_named(caplog):
    model = nn.Sequential(nn.Linear(D, H), torch.jit.script(nn.Linear(H, H)), nn.Linear(H, V))
    with watch_model(model) as watch:
        train(model, 3)
    assert caplog.messages == ["1 modules are scripted, which bypasses hooks: their outputs are not watched"]
    assert watch.last.layers.keys() == {"0", "1", "2"}
    assert watch.last.outputs.keys() == {"0", "2"}
    with watch_model(torch.jit.script(nn.Linear(D, V))) as watch:
        train(watch.measurement.model, 2)
    assert watch.next_step == 2


def hooks_of(model):
    return [
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, *map(after, module._parameters.values()))
        if hooks
    ]


def after(parameter):
    return None if parameter is None else parameter._post_accumulate_grad_hooks


def test_a_watch_that_cannot_start_leaves_nothing(tmp_path):
    gc.collect()
    model, unscale = Net(), GradScaler.unscale_
    with watch_model(model, dump=tmp_path / "dump"):
        train(model, 1)
    with pytest.raises(ContractError, match="holds a dump already"):
        watch_model(model, dump=tmp_path / "dump")
    assert hooks_of(model) == []
    assert GradScaler.unscale_ is unscale


def test_a_second_watch_of_a_model_ends_the_first(tmp_path, caplog):
    model = Net()
    for _ in range(2):
        watch = watch_model(model, log=tmp_path / "log.jsonl")
    assert caplog.messages == ["the model is watched already: the earlier watch ends at step 0"]
    train(model, 3)
    assert [line["step"] for line in read_step_log(tmp_path / "log.jsonl")] == [0, 1, 2]
    watch.remove()
    assert hooks_of(model) == []


def test_a_training_that_raised_can_begin_again(tmp_path):
    from instruments.precision import WatchCallback

    model, callback, state = Net(), WatchCallback(log=tmp_path / "log.jsonl"), SimpleNamespace(global_step=0)
    arguments = SimpleNamespace(world_size=1, average_tokens_across_devices=True)
    callback.on_train_begin(arguments, state, None, model=model)
    callback.on_train_begin(arguments, state, None, model=model)
    train(model, 2)
    callback.on_train_end(None, state, None)
    assert [line["step"] for line in read_step_log(tmp_path / "log.jsonl")] == [1, 2]
    assert hooks_of(model) == []
