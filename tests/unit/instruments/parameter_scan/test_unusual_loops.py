"""The scanner in loops that compile the model, pass empty batches or transform it; norms are those of autograd."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM

from instruments.errors import NumericsError
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

B, T, V, D, F = 3, 6, 17, 4, 9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.body = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))

    def forward(self, input_ids):
        return self.head(self.body(self.embed(input_ids)))


IDS = torch.arange(B * T).view(B, T) * 5 % V


def loss_of(logits, ids=IDS):
    return functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1).sum()


def truth(model):
    """Norm of the gradient of every weight, by sample."""
    norms = {}
    for ids in IDS.split(1):
        model.zero_grad()
        loss_of(model(input_ids=ids), ids).backward()
        for name, weight in model.named_parameters():
            norms.setdefault(name, []).append(weight.grad.norm().item())
    model.zero_grad()
    return norms


def check(scanner, expected, records=1):
    found = scanner.collect()
    assert len(found) == records
    assert scanner.left_out == {}
    for record in found:
        for column, parameter in enumerate(scanner.parameters):
            assert record.gradient_BP[:, column].tolist() == pytest.approx(expected[parameter.name], rel=1e-4)
    return found


def test_a_scan_that_recorded_nothing_says_so(caplog):
    model = Net()
    with ParameterTensorScanner(model):
        pass
    with ParameterTensorScanner(model):
        model(input_ids=IDS)
    with ParameterTensorScanner(model) as scanner:
        loss_of(model.head(model.body(model.embed(IDS)))).backward()
    assert scanner.collect() == []
    (forward_alone, parts) = caplog.messages
    assert parts.startswith("parameter scan: nothing was recorded: call the scanned model, not a part of it")
    assert forward_alone == parts


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch.compile
@pytest.mark.parametrize("how", ["before", "wrapped", "part"])
def test_compiled_models(how):
    torch._dynamo.reset()
    model, backend = Net(), "aot_eager" if how == "before" else "eager"
    expected = truth(model)
    called = torch.compile(model, backend=backend) if how in {"before", "wrapped"} else model
    if how == "before":
        called(input_ids=IDS)
    if how == "part":
        model.body.compile(backend=backend)
    with ParameterTensorScanner(called if how == "wrapped" else model) as scanner:
        for _ in range(2):
            loss_of(called(input_ids=IDS)).backward()
    check(scanner, expected, records=2)


def test_every_second_pass_is_measured_and_the_others_leave_no_trace():
    """Also where both passes have one backward pass, which recomputes their layers."""
    model = Net()
    expected, run = truth(model), model.body.forward
    model.body.forward = lambda x: checkpoint(run, x, use_reentrant=False)
    with ParameterTensorScanner(model, every_steps=2) as scanner:
        loss_of(model(input_ids=IDS)).backward()
        with torch.no_grad():
            model(input_ids=IDS)  # an evaluation is no step
        second = loss_of(model(input_ids=IDS.flip(1)), IDS.flip(1))
        (second + loss_of(model(input_ids=IDS))).backward()
    records = check(scanner, expected, records=2)
    assert [record.sequences[0].name for record in records] == ["step 1, sample 1", "step 3, sample 1"]


def run_twice(net, x):
    return net.head(checkpoint(lambda x: net.body(net.body(x)), x, use_reentrant=False))


def transpose_later(net, x):
    x = checkpoint(net.body, x, use_reentrant=False)
    return checkpoint(lambda x: net.head(x.transpose(0, 1)), x, use_reentrant=False).transpose(0, 1)


@pytest.mark.parametrize(
    ("forward", "left_out"), [(run_twice, {"body.0.weight", "body.2.weight"}), (transpose_later, {"head.weight"})]
)
def test_layers_left_out_under_a_checkpoint_get_their_own_gradients(forward, left_out):
    """The recomputed pass knows more than the first one; it saves the same tensors."""
    model, ids = Net(), IDS[:, :B]
    expected = torch.autograd.grad(loss_of(forward(model, model.embed(ids)), ids), [*model.parameters()])
    model.forward = lambda input_ids: forward(model, model.embed(input_ids))
    with ParameterTensorScanner(model) as scanner:
        loss_of(model(input_ids=ids), ids).backward()
    assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), expected, strict=True))
    assert set(scanner.left_out) == left_out
    (record,) = scanner.collect()
    unmeasured = {one.name for one, norm in zip(scanner.parameters, record.gradient_BP[0], strict=True) if norm.isnan()}
    assert unmeasured == left_out


def test_layers_split_over_processes_are_left_out(mesh):
    model = Net()
    expected = truth(model)
    parallelize_module(model.body, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with ParameterTensorScanner(model) as scanner:
        loss_of(model(input_ids=IDS)).backward()
    assert scanner.left_out == dict.fromkeys(("body.0.weight", "body.2.weight"), "its weight is split over processes")
    (record,) = scanner.collect()
    for column in (0, 1):
        name = scanner.parameters[column].name
        assert record.gradient_BP[:, column].tolist() == pytest.approx(expected[name], rel=1e-4)


def test_a_pass_that_is_not_finite_costs_no_other_pass():
    model = Net()
    expected, scanner = truth(model), ParameterTensorScanner(model)

    def scan():
        with scanner:
            for scale in (1.0, float("inf"), 1.0, 1.0):
                (scale * loss_of(model(input_ids=IDS))).backward()

    with pytest.raises(NumericsError):
        scan()
    names = [record.sequences[0].name for record in check(scanner, expected, records=3)]
    assert names == [f"step {step}, sample 1" for step in (1, 3, 4)]


class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["scanner", "dump"])
def test_an_interrupt_inside_of_fused_experts_leaves_no_mode_of_torch_behind(how, tmp_path):
    config = MixtralConfig(
        vocab_size=V, hidden_size=8, intermediate_size=F, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    watching = TensorDump(model, tmp_path / "dump", environment={}) if how == "dump" else ParameterTensorScanner(model)
    model.model.layers[0].mlp.experts.act_fn = Interrupted()
    with pytest.raises(KeyboardInterrupt), watching:
        model(input_ids=IDS)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_a_batch_without_tokens_has_no_record(shape):
    model = Net()
    expected = truth(model)
    with ParameterTensorScanner(model) as scanner:
        model(input_ids=torch.zeros(shape, dtype=torch.long)).sum().backward()
        loss_of(model(input_ids=IDS)).backward()
    check(scanner, expected)


def test_per_sample_gradients_by_torch_func(tmp_path):
    model = Net()
    expected, parameters = truth(model), {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(parameters, ids):
        return loss_of(functional_call(model, parameters, (), {"input_ids": ids[None]}), ids[None])

    with ParameterTensorScanner(model) as scanner, TensorDump(model, tmp_path / "dump", environment={}) as dump:
        found = vmap(grad(loss), (None, 0))(parameters, IDS)
        loss_of(model(input_ids=IDS)).backward()
        dump.step()
    check(scanner, expected)
    for name, gradients in found.items():
        assert gradients.flatten(1).norm(dim=1).tolist() == pytest.approx(expected[name], rel=1e-4)
    sources = [record.source for record in DumpReader(tmp_path / "dump").records]
    assert {(source.call, source.evaluation) for source in sources} == {(0, False)}


def test_a_gradient_of_gradients_is_not_recorded(caplog):
    """It reaches the weights also by the first backward pass, where no hook is."""
    model = Net()
    expected = truth(model)
    with ParameterTensorScanner(model) as scanner:
        loss = loss_of(model(input_ids=IDS))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(one.square().sum() for one in gradients).backward()
        assert caplog.messages == ["parameter scan: gradients of gradients (create_graph=True) are not recorded"]
        loss_of(model(input_ids=IDS)).backward()
    check(scanner, expected, records=2)


def test_weights_are_of_their_own_class_outside_of_a_pass():
    """Inside, those whose module does not run are of a subclass, and torch passes functions without them to nobody."""
    model, seen = Net(), []
    kinds = [type(weight) for weight in model.parameters()]

    def interrupt(_module, _args):
        seen.append(([type(weight) for weight in model.parameters()], torch._C._len_torch_function_stack()))
        if len(seen) != 2:
            raise KeyboardInterrupt

    model.body[1].register_forward_pre_hook(interrupt)
    with ParameterTensorScanner(model) as scanner:
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=IDS)
        loss_of(model(input_ids=IDS)).backward()
        assert [type(weight) for weight in model.parameters()] == kinds
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=IDS)
    assert [type(weight) for weight in model.parameters()] == kinds
    assert len(scanner.collect()) == 1
    for inside, modes in seen:
        assert inside != kinds
        assert all(issubclass(one, kind) for one, kind in zip(inside, kinds, strict=True))
        assert modes == 0
