"""The parameter-level scanner against autograd's true per-sample weight gradients."""

import pytest
import torch
from pico import write_pico
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from unit.instruments.parameter_scan.recordings import ARRAYS

from instruments import device
from instruments.parameter_scan.passes import Passes
from instruments.parameter_scan.scanner import ParameterTensorScanner
from stages.losses import enable_gradient_checkpointing

# With norms of queries and keys, with biases, and with fused matrices; tied embeddings or not.
MODELS = [("qwen3", True), ("qwen2", False), ("phi3", True)]
LENGTHS = (9, 5, 7)
WIDTH = 7  # block width; divides neither 24 nor 40


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    family, tie = request.param
    return write_pico(tmp_path_factory.mktemp("dense"), family, tie=tie)


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def draw_batch(side="right"):
    """Three samples of different lengths, padded on one side; the second starts with masked labels, like a prompt.

    Token 0 is the padding token and also occurs in the text: nn.Embedding does not train its row.
    """
    generator = torch.Generator().manual_seed(3)
    ids, mask, labels = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long), []
    for row, length in enumerate(LENGTHS):
        first = 0 if side == "right" else 9 - length
        tokens = torch.randint(1, 9, (length,), generator=generator)  # few values, so that tokens repeat
        tokens[length // 2] = 0
        ids[row, first : first + length] = tokens
        mask[row, first : first + length] = 1
        labels.append(first + (3 if row == 1 else 1))  # a padding position must not predict the first token
    positions = torch.arange(9)
    supervised = (mask == 1) & (positions >= torch.tensor(labels).unsqueeze(1))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~supervised, -100)}


def one_sample(batch, row):
    """A row without its padding on the right."""
    return {name: tensor[row : row + 1, : LENGTHS[row]] for name, tensor in batch.items()}


def backward(model, batch):
    """Backpropagate the sum of the samples' mean losses, which keeps each sample's gradient independent."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = [cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, batch["labels"], strict=True)]
    torch.stack(losses).sum().backward()


def true_gradients(model, batch, names):
    """Weight gradients of each sample by plain autograd, without padding, in fp64."""
    model.requires_grad_(True)
    weights = dict(model.named_parameters())
    found = []
    for row in range(len(LENGTHS)):
        model.zero_grad()
        backward(model, one_sample(batch, row))
        found.append({name: weights[name].grad.double().clone() for name in names})
    return found


def cut(matrix, width, dim):
    return torch.stack([block.norm() for block in matrix.split(width, dim)])


def expected_norms(parameters, gradients):
    """Compute gradient_BP, in_gradient_BI and out_gradient_BO from true gradients."""
    totals, inputs, outputs = [], [], []
    for sample in gradients:
        pairs = [(sample[parameter.name], parameter) for parameter in parameters]
        linear = [(grad, one.in_width) for grad, one in pairs if one.kind == "linear"]
        totals.append(torch.stack([grad.norm() for grad, _ in pairs]))
        inputs.append(torch.cat([cut(grad, width, 1) for grad, width in linear]))
        outputs.append(torch.cat([cut(grad, one.out_width, 0 if one.kind == "linear" else 1) for grad, one in pairs]))
    return torch.stack(totals), torch.stack(inputs), torch.stack(outputs)


def assert_norms(record, expected):
    found = (record.gradient_BP, record.in_gradient_BI, record.out_gradient_BO)
    for name, tensor, truth in zip(("whole", "input blocks", "output blocks"), found, expected, strict=True):
        assert tensor.dtype == torch.float32
        error = ((tensor.double() - truth).abs() / truth).max()
        assert error <= 1e-5, (name, float(error))


@pytest.fixture(scope="module")
def truth(folder):
    with ParameterTensorScanner(load(folder), block_width=WIDTH) as scanner:
        parameters = scanner.parameters
    return expected_norms(parameters, true_gradients(load(folder), draw_batch(), [p.name for p in parameters]))


def prepare(folder, *, training, checkpointing):
    model = load(folder).requires_grad_(training)
    if checkpointing != "none":
        enable_gradient_checkpointing(model, reentrant=checkpointing == "reentrant")
    return model


@pytest.mark.parametrize(
    ("training", "checkpointing", "product"),
    [
        *((False, "none", product) for product in ("gram", "direct")),
        *((True, "none", product) for product in ("gram", "direct")),
        *((training, way, "gram") for training in (False, True) for way in ("non-reentrant", "reentrant")),
    ],
)
@pytest.mark.parametrize("hosts", [{"cpu"}, set()], ids=["as on a CPU", "as on a GPU"])
def test_norms_equal_those_of_true_weight_gradients(
    folder, truth, training, checkpointing, product, hosts, monkeypatch
):
    monkeypatch.setattr(device, "HOSTS", hosts)
    monkeypatch.setattr(Passes, "product", product)
    model = prepare(folder, training=training, checkpointing=checkpointing)
    with ParameterTensorScanner(model, block_width=WIDTH) as scanner:
        backward(model, draw_batch())
        (record,) = scanner.collect()
    assert_norms(record, truth)
    assert [sequence.tokens for sequence in record.sequences] == list(LENGTHS)
    untied = model.lm_head.weight is not model.get_input_embeddings().weight
    assert len(scanner.parameters) == (9 if "phi3" in str(model.config.model_type) else 15) + untied


def test_left_padding_and_single_samples_give_the_same(folder):
    model = load(folder).requires_grad_(False)
    records = {}
    with ParameterTensorScanner(model, block_width=WIDTH) as scanner:
        for side in ("right", "left"):
            backward(model, draw_batch(side))
            (records[side],) = scanner.collect()
        for row in range(len(LENGTHS)):
            backward(model, one_sample(draw_batch(), row))
            (alone,) = scanner.collect()
            for side, name in ((side, name) for side in records for name in ARRAYS.values()):
                together = getattr(records[side], name)[row]
                torch.testing.assert_close(together, getattr(alone, name)[0], rtol=2e-5, atol=1e-7, msg=name)


def test_activations_are_those_of_plain_hooks_without_padding(folder):
    batch, model = draw_batch(), load(folder).requires_grad_(False)
    with ParameterTensorScanner(model, block_width=WIDTH) as scanner:
        backward(model, batch)
        (record,) = scanner.collect()
    with ParameterTensorScanner(model, block_width=WIDTH, gradients=False) as forward_only, torch.no_grad():
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        (forward,) = forward_only.collect()
    seen, modules = {}, dict(model.named_modules())

    def keep(parameter):
        def hook(_module, args, out):
            seen[parameter.name] = (args[0] if parameter.kind == "linear" else out).detach()[0].double()

        modules[parameter.name.removesuffix(".weight")].register_forward_hook(hook)

    for parameter in scanner.parameters:
        keep(parameter)
    for row in range(len(LENGTHS)):
        model(input_ids=one_sample(batch, row)["input_ids"])
        totals = torch.stack([seen[parameter.name].norm() for parameter in scanner.parameters])
        linears = [parameter for parameter in scanner.parameters if parameter.kind == "linear"]
        blocks = torch.cat([cut(seen[parameter.name], parameter.in_width, 1) for parameter in linears])
        for found in (record, forward):
            torch.testing.assert_close(found.activation_BP[row].double(), totals, rtol=1e-5, atol=0)
            torch.testing.assert_close(found.in_activation_BI[row].double(), blocks, rtol=1e-5, atol=1e-9)
    for name in ("gradient_BP", "in_gradient_BI", "out_gradient_BO"):
        assert getattr(forward, name).isnan().all()


def half_errors(folder, dtype, *, autocast):
    """Largest relative errors of whole-parameter norms against fp32: the scanner's, and those of true gradients.

    Both use the same number format; where a processor rounds depends on its type.
    """
    batch, worst = draw_batch(), torch.zeros(2, dtype=torch.float64)

    def run(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            backward(model, batch)

    model, twin, exact = load(folder, dtype).requires_grad_(False), load(folder, dtype), load(folder, torch.float32)
    exact.load_state_dict(model.state_dict())
    with ParameterTensorScanner(model, block_width=WIDTH) as scanner:
        run(model, batch)
        (record,) = scanner.collect()
    halves, wholes = dict(twin.named_parameters()), dict(exact.named_parameters())
    for row in range(len(LENGTHS)):
        twin.zero_grad()
        exact.zero_grad()
        run(twin, one_sample(batch, row))
        backward(exact, one_sample(batch, row))
        for column, parameter in enumerate(scanner.parameters):
            found = torch.stack([record.gradient_BP[row, column], halves[parameter.name].grad.float().norm()])
            truth = wholes[parameter.name].grad.double().norm()
            worst = torch.maximum(worst, (found.double() - truth).abs() / truth)
    return worst.tolist()


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
)
def test_half_precision_is_within_its_rounding(folder, dtype, autocast):
    found, plain = half_errors(folder, dtype, autocast=autocast)
    assert 0 < found <= 2 * plain
