"""The parameter-level scanner in users' models and loops: it changes no result and leaves no hooks or tensors."""

import gc
import tracemalloc
import weakref

import pytest
import torch
from accelerate import disk_offload
from pico import write_pico
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from unit.instruments.parameter_scan.recordings import ARRAYS

from instruments.errors import ConfigError, NumericsError
from instruments.parameter_scan.scanner import ParameterTensorScanner
from stages.losses import enable_gradient_checkpointing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("dense"), "qwen3", tie=True)


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def model(folder):
    return plain_model(folder)


def draw(seed, samples=2, length=7):
    ids = torch.randint(1, 61, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def scan(model, batch, **settings):
    with ParameterTensorScanner(model, **settings) as scanner:
        model(**batch).loss.backward()
        (record,) = scanner.collect()
    return record


def assert_same(found, expected, **tolerance):
    for name in ARRAYS.values():
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name, equal_nan=True, **tolerance)


def count_hooks(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, table)) for module in model.modules() for table in tables)


@pytest.mark.parametrize("training", [False, True])
def test_logits_loss_and_gradients_are_bit_equal(folder, model, training):
    plain = plain_model(folder)
    model.train(training)
    plain.train(training)
    expected = plain(**draw(0))
    expected.loss.backward()
    with ParameterTensorScanner(model):
        found = model(**draw(0))
        found.loss.backward()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model.zero_grad()
    scan(model.requires_grad_(False), draw(0))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("gradients", [True, False])
def test_generation_is_unchanged(model, gradients):
    prompt = draw(1)["input_ids"]
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    with ParameterTensorScanner(model, gradients=gradients) as scanner:
        found = model.generate(prompt, max_new_tokens=5, do_sample=False)
        records = scanner.collect()
    assert torch.equal(found, expected)
    # Forward only: the prompt, then one position per step with the KV cache.
    assert [record.sequences[0].tokens for record in records] == ([] if gradients else [7, 1, 1, 1, 1])


def test_no_hook_and_no_tensor_is_left(folder):
    model = plain_model(folder).requires_grad_(False)
    hooks, scanner = count_hooks(model), ParameterTensorScanner(model)
    with scanner:
        assert count_hooks(model) > hooks
        model(**draw(0)).loss.backward()
        output = model(**draw(1))  # a pass without a backward pass
    assert count_hooks(model) == hooks
    logits, dead = weakref.ref(output.logits), weakref.ref(model)
    del output, model
    gc.collect()
    assert (logits(), dead()) == (None, None)
    assert not [value for value in vars(scanner).values() if isinstance(value, torch.Tensor)]
    assert len(scanner.collect()) == 1  # the record is still available


def test_a_scanner_is_used_once_and_names_every_sample(model):
    hooks, scanner = count_hooks(model), ParameterTensorScanner(model)
    with scanner:
        scanner.name_samples(["one"])
        with pytest.raises(ConfigError, match="1 names for 2 samples"):
            model(**draw(0))
    assert count_hooks(model) == hooks
    with pytest.raises(ConfigError, match="this scanner has ended"), scanner:
        pass


def test_memory_is_flat(model):
    def live():
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return tensors, tracemalloc.get_traced_memory()[0]

    def run(steps):
        for step in range(steps):
            model(**draw(step)).loss.backward()
            scanner.collect()

    model.requires_grad_(False)
    tracemalloc.start()
    try:
        with ParameterTensorScanner(model) as scanner:
            run(20)  # Python's own caches fill up
            tensors, allocated = live()
            run(20)
            tensors_after, allocated_after = live()
    finally:
        tracemalloc.stop()
    assert tensors_after <= tensors
    assert allocated_after - allocated < 32 * 1024  # less than the buffers of one step


def test_names_and_the_source_of_the_next_pass(model):
    with ParameterTensorScanner(model.requires_grad_(False)) as scanner:
        for step in range(3):
            model(**draw(step)).loss.backward()
            scanner.name_samples([f"batch {step}a", f"batch {step}b"], source="text.jsonl")
    records = scanner.collect()
    assert [sequence.name for record in records for sequence in record.sequences] == [
        "step 1, sample 1", "step 1, sample 2", "batch 0a", "batch 0b", "batch 1a", "batch 1b",
    ]  # fmt: skip
    assert [record.sequences[0].source for record in records] == ["", "text.jsonl", "text.jsonl"]


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("together", [True, False])
def test_forward_passes_before_the_backward_passes_keep_apart(model, together, checkpointing):
    expected = [scan(model, draw(step)) for step in range(3)]
    if checkpointing is not None:
        enable_gradient_checkpointing(model, reentrant=checkpointing)
    with ParameterTensorScanner(model) as scanner:
        losses = [model(**draw(step)).loss for step in range(3)]
        if together:
            sum(losses[1:], losses[0]).backward()
        else:
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
        records = sorted(scanner.collect(), key=lambda record: record.sequences[0].name)
    for found, truth in zip(records, expected, strict=True):
        assert_same(found, truth, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_under_one_checkpoint(model, reentrant):
    expected = scan(model, draw(0))
    batch = draw(0)
    switch = torch.zeros((), requires_grad=True)  # reentrant checkpointing needs an input with a gradient

    def run(ids, _switch):
        return model(input_ids=ids, labels=batch["labels"]).loss

    with ParameterTensorScanner(model) as scanner:
        checkpoint(run, batch["input_ids"], switch, use_reentrant=reentrant).backward()
        (record,) = scanner.collect()
    assert_same(record, expected, rtol=1e-6, atol=0)


def test_two_backward_passes_through_one_graph_are_two_records(model):
    expected = scan(model, draw(0))
    with ParameterTensorScanner(model) as scanner:
        loss = model(**draw(0)).loss
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        once, thrice = scanner.collect()
    assert_same(once, expected, rtol=0, atol=0)
    torch.testing.assert_close(thrice.gradient_BP, 3 * expected.gradient_BP, rtol=1e-5, atol=0)


def test_a_backward_pass_inside_autocast_measures_in_fp32(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**draw(0)).loss
    with ParameterTensorScanner(model) as scanner, torch.autocast("cpu", torch.bfloat16):
        model(**draw(0)).loss.backward()
        (inside,) = scanner.collect()
    with ParameterTensorScanner(model) as scanner:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**draw(0)).loss
        loss.backward()
        (outside,) = scanner.collect()
    torch.testing.assert_close(inside.activation_BP, outside.activation_BP, rtol=0, atol=0)
    torch.testing.assert_close(inside.gradient_BP, outside.gradient_BP, rtol=2e-2, atol=0)


def test_embeddings_given_by_the_caller(model):
    """The embedding does not run, so its values are NaN; all layers are recorded, also with frozen weights."""
    expected = scan(model, draw(0))
    model.requires_grad_(False)
    batch = draw(0)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
    record = scan(model, batch)
    assert record.activation_BP[:, 0].isnan().all()
    assert record.gradient_BP[:, 0].isnan().all()
    torch.testing.assert_close(record.gradient_BP[:, 1:], expected.gradient_BP[:, 1:], rtol=1e-6, atol=0)
    torch.testing.assert_close(record.activation_BP[:, 1:], expected.activation_BP[:, 1:], rtol=1e-6, atol=0)


def test_logits_of_the_last_positions_only(model):
    """`logits_to_keep`: the tied output embedding sees fewer positions than the layers."""
    batch = draw(0)
    batch["labels"][:, :4] = -100
    with ParameterTensorScanner(model) as scanner:
        logits = model(input_ids=batch["input_ids"], logits_to_keep=4).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 4:].flatten()).backward()
        (record,) = scanner.collect()
    assert_same(record, scan(model, batch), rtol=1e-5, atol=1e-8)


def test_samples_without_a_supervised_token_are_named_and_left_out(model):
    batch = draw(0, samples=3)
    batch["labels"][1] = -100
    batch["labels"][2, 1:] = -100  # the shift removes the only label
    with ParameterTensorScanner(model) as scanner:
        scanner.name_samples(["good", "masked", "one label"])
        model(**batch).loss.backward()
        (record,) = scanner.collect()
    assert [sequence.name for sequence in record.sequences] == ["good"]
    assert record.gradient_BP.shape == (1, len(scanner.parameters))
    assert scanner.skipped == ["masked", "one label"]


def test_a_gradient_of_zero_is_an_error(model):
    with ParameterTensorScanner(model) as scanner:
        logits = model(input_ids=draw(0, samples=3)["input_ids"]).logits
        logits[0].sum().backward()
        with pytest.raises(NumericsError, match="is missing, zero or not finite") as caught:
            scanner.collect()
        assert caught.value.where == "step 1, sample 2; step 1, sample 3"
        model(**draw(1)).loss.backward()
        assert len(scanner.collect()) == 1  # the scanner still works


def test_a_gradient_that_is_not_finite_is_an_error(model):
    with ParameterTensorScanner(model) as scanner:
        (model(**draw(0)).loss * float("inf")).backward()
        with pytest.raises(NumericsError, match="is missing, zero or not finite") as caught:
            scanner.collect()
    assert caught.value.where == (
        "step 1, sample 1; step 1, sample 2; of model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.up_proj.weight, model.layers.1.mlp.gate_proj.weight and 12 more"
    )


def test_a_model_has_one_scanner_at_a_time(model):
    for other in (model, model.model):
        with (
            pytest.raises(ConfigError, match=r"^the model is being scanned already"),
            ParameterTensorScanner(model),
            ParameterTensorScanner(other),
        ):
            pass
    scan(model, draw(0))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_offloaded_to_disk(tmp_path, tied):
    """All modules, also a tied output embedding, hold placeholders between calls."""
    folder = write_pico(tmp_path / "dense", "qwen3", tie=tied)
    model = plain_model(folder).requires_grad_(False)
    expected = scan(model, draw(0))
    disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    found = scan(model.requires_grad_(False), draw(0))
    assert_same(found, expected, rtol=1e-6, atol=0)
