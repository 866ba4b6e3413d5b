import pytest
import torch
from benchmarks.peak_memory import layer_activations
from benchmarks.rows import Row, show_rows
from benchmarks.timing import Task, take_turns
from benchmarks.workbench import SHAPES, make_workbench, read_options
from pico import write_pico
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture
def bench(tmp_path):
    folder = write_pico(tmp_path / "pico", "qwen3")
    return make_workbench(read_options(["--model", str(folder), "--tokens", "54", "--length", "27"]))


def test_the_batch_is_as_asked_for_and_some_tokens_keep_their_bits(bench):
    assert bench.batch.input_ids.shape == (2, 27)
    assert (bench.slots_BT >= 0).sum() == round(2 * 27 * 4096 / 65536)
    assert bench.first_sequence().batch.input_ids.shape == bench.first_sequence().slots_BT.shape == (1, 27)


def test_frozen_steps_make_no_weight_gradients_and_training_steps_make_all(bench):
    weights = list(bench.model.parameters())
    bench.frozen_step()
    assert all(weight.grad is None for weight in weights)
    bench.thaw()
    bench.train_step()
    assert all(weight.grad is not None for weight in weights)
    bench.freeze()
    assert all(weight.grad is None and not weight.requires_grad for weight in weights)


def test_activations_of_a_layer_grow_with_its_tokens(bench):
    whole, one = layer_activations(bench), layer_activations(bench.first_sequence())
    assert 1.9 * one < whole <= 2 * one
    floats = 27 * (4 * 40 + 2 * 24)  # gate, up, act(gate) and h; the inputs of attention and FFN
    assert one > floats * torch.float32.itemsize


def test_random_weights_take_the_shape_of_the_folder(bench, tmp_path):
    drawn = make_workbench(read_options(["--model", str(tmp_path / "pico"), "--random", "--tokens", "27"]))
    assert drawn.model.state_dict().keys() == bench.model.state_dict().keys()
    assert not torch.equal(drawn.model.lm_head.weight, bench.model.lm_head.weight)
    assert not any(weight.requires_grad for weight in drawn.model.parameters())


def test_the_known_shape_has_its_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["qwen3-1.7b"]))
    assert sum(weight.numel() for weight in model.parameters()) == 1_720_574_976


def test_the_table_shows_median_spread_and_target():
    table = show_rows([Row("scan ÷ step", [1.0, 0.8, 3.0], at_most=1.05), Row("sets", [250.0], unit="MiB", note="n")])
    assert table.splitlines() == [
        "what         measured    spread         target    met    note",
        "-----------  ----------  -------------  --------  -----  ------",
        "scan ÷ step  1.000       0.800 … 3.000  ≤ 1.05    yes",
        "sets         250 MiB                                     n",
    ]


@pytest.mark.parametrize(
    ("bounds", "met"), [({}, None), ({"at_most": 1.9}, False), ({"at_least": 2.0}, True), ({"at_least": 2.1}, False)]
)
def test_a_target_is_met_by_the_median(bounds, met):
    row = Row("what", [9.0, 2.0, 0.0], **bounds)
    assert row.met is met
    fields = {"what": "what", "values": [9.0, 2.0, 0.0], "at_most": None, "at_least": None, "unit": "", "note": ""}
    assert row.record() == fields | {"measured": 2.0, "met": met} | bounds


def test_tasks_take_turns_and_the_first_round_does_not_count():
    log = []
    tasks = {
        "a": Task(lambda: log.append("a")),
        "b": Task(lambda: log.append("b"), lambda: log.append("before"), lambda: log.append("after")),
    }
    seconds = take_turns(tasks, 2, torch.device("cpu"))
    assert log == ["a", "before", "b", "after"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    assert all(value >= 0 for values in seconds.values() for value in values)
