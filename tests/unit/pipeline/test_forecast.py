"""Predicted costs of a run: formulas against torch's FLOP counter, and warnings about too little memory."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from pipeline.cli import run_command
from pipeline.cost import COSTS, forward, layer_pass, loaded_bytes, solve_bytes
from pipeline.forecast import (
    COMPILING,
    Rates,
    costs_of,
    describe_temporary,
    fewer_baselines,
    free_tensor_memory,
    memory_warnings,
    smaller_settings,
)
from pipeline.plan import make_plan
from pipeline.run import Runner
from pipeline.settings import compose, register_schema
from pipeline.validate import validate
from pipeline.workload import Cost, sizes_of

CHAIN = ("scan", "score", "cluster", "extract", "assemble", "project", "evaluate")


@pytest.fixture
def planned(tmp_path):
    """Function that returns the checked settings and the steps of a command line."""
    register_schema()

    def plan(*words):
        checked = validate(compose([*words, f"output_dir={tmp_path}"])[0])
        return checked, make_plan(checked)

    return plan


def costs(planned, *words):
    checked, steps = planned(*words)
    return costs_of(steps, checked)


def test_more_of_the_text_costs_more_where_it_is_read(planned):
    few, many = (costs(planned, f"data.tokens={count}") for count in (65536, 131072))
    assert few.keys() == many.keys() == set(CHAIN)
    for stage in ("scan", "cluster", "assemble", "extract", "score"):  # these read the first 16,384 only
        assert many[stage] == few[stage], stage
    for stage in ("project", "evaluate"):
        assert many[stage].products > 1.1 * few[stage].products
        assert many[stage].device > 1.3 * few[stage].device
    assert few["scan"].products > 1.9 * costs(planned, "data.sample_tokens=8192")["scan"].products


def test_a_kept_stage_costs_nothing(planned):
    checked, steps = planned("stage=scan")
    assert set(costs_of(steps, checked)) == {"scan"}
    steps = [replace(step, due=False) for step in steps]
    assert not costs_of(steps, checked)
    assert not memory_warnings(checked, steps, free=1)


def test_no_stage_grows_worse_than_the_cube_of_the_width(planned):
    checked, _ = planned()
    small = sizes_of(checked, on_host=False)
    wide = replace(small, width=4 * small.width, experts=4 * small.experts)
    for stage, cost in COSTS.items():
        few, many = cost(small, checked.settings), cost(wide, checked.settings)
        assert many.solves <= 64 * few.solves, stage
        assert many.products + many.touched <= 64 * (few.products + few.touched), stage


def test_the_solve_of_a_wide_layer_is_in_memory_together_with_the_pass(planned):
    checked, _ = planned("project=align")
    sizes = sizes_of(checked, on_host=True)
    wide = replace(sizes, width=16 * sizes.width)
    held = layer_pass(wide, checked.settings.data.tokens).device + solve_bytes(wide.width, wide.hidden)
    assert held < COSTS["project"](wide, checked.settings).device < 1.2 * held
    assert solve_bytes(wide.width, wide.hidden) > 0.5 * held


def test_seconds_are_of_all_work():
    rates = Rates(products=2.0, solves=4.0, touched=8.0, cells=16.0, disk=32.0)
    cost = Cost(products=2, solves=4, touched=8, cells=16, read=16, written=16)
    assert rates.seconds(cost) - rates.seconds(Cost()) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("stage", "free", "remedy"), [("scan", 720, "scan.batch_tokens="), ("project", 900, "model.hidden_memory=0GB")]
)
def test_memory_that_does_not_suffice_is_said_with_a_setting_that_does(planned, stage, free, remedy):
    checked, steps = planned("cluster.map=none")
    assert memory_warnings(checked, steps, free=8 * 2**30) == []
    said = {text.split()[0]: text for text in memory_warnings(checked, steps, free * 2**20)}
    what, do = said[f"stage={stage}"].splitlines()
    assert what.endswith(f"of memory, {free:.1f} MiB are free" if free < 1000 else "of memory, 1,000.0 MiB are free")
    words = do.removeprefix("  do:    ")
    assert words.startswith(remedy)
    again, steps = planned("cluster.map=none", *words.split())
    assert not [text for text in memory_warnings(again, steps, free * 2**20) if text.startswith(f"stage={stage} ")]


@pytest.mark.parametrize(("batch", "micro_batch", "advised"), [(14, 7, [1]), (24, 12, [6, 3, 1]), (16, 8, [4, 2, 1])])
def test_a_smaller_micro_batch_divides_the_batch(planned, batch, micro_batch, advised):
    words = ("stage=train", f"train.batch={batch}", f"train.micro_batch={micro_batch}")
    found = [*smaller_settings("train", planned(*words)[0])]
    assert [checked.settings.train.micro_batch for _, checked in found] == advised
    for text, _ in found:
        assert planned(*words, *text.split())


def test_the_memory_of_a_gpu_holds_the_tensors_alone(planned, monkeypatch):
    checked, steps = planned("cluster.map=none")
    cost = costs_of(steps, checked)["project"]
    on_gpu = replace(checked, settings=replace(checked.settings, model=ModelConfig(device="cuda")))
    said = memory_warnings(on_gpu, steps, free=cost.device - 1)
    assert any(text.startswith("stage=project needs about ") and "of GPU memory, " in text for text in said)
    assert not [text for text in memory_warnings(on_gpu, steps, free=cost.device) if text.startswith("stage=project")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (7, 8) if device.type == "cuda" else None)
    assert free_tensor_memory(on_gpu.settings) == 7


def test_device_auto_counts_what_a_gpu_would_hold(planned):
    """On a GPU the dense model keeps the checkpoint's two bytes per weight, and the scan takes larger batches."""
    checked, _ = planned()
    host, gpu = (sizes_of(checked, on_host=on_host) for on_host in (True, False))
    assert checked.settings.model.device == "auto"
    assert loaded_bytes(host, checked.settings) == 4 * host.parameters
    assert loaded_bytes(gpu, checked.settings) == 2 * host.parameters
    larger = checked.settings.scan.read_batch("cuda") / checked.settings.scan.read_batch("cpu")
    scan = COSTS["scan"]
    saved = [scan(sizes, checked.settings).device - loaded_bytes(sizes, checked.settings) for sizes in (host, gpu)]
    assert saved[1] == pytest.approx(larger * saved[0])


def test_a_quantised_model_is_scanned_and_not_compared_with(planned):
    checked, _ = planned("train=distil", "evaluate.baselines=[]")
    plain, sizes = checked.settings, sizes_of(checked, on_host=False)
    nf4 = replace(plain, model=replace(plain.model, quantization="nf4"))
    assert COSTS["scan"](sizes, nf4).device < COSTS["scan"](sizes, plain).device
    for stage in ("train", "evaluate"):
        assert COSTS[stage](sizes, nf4) == COSTS[stage](sizes, plain), stage


def test_a_plan_runs_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.forecast.SECONDS", 0.01)
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("a stage ran"))
    assert run_command(["plan=true", f"output_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split() and line.split()[0] in CHAIN}
    assert set(rows) == set(CHAIN)
    assert rows["scan"][1] == "16,384"
    assert rows["scan"][-1] == "s"
    assert "measured here: products" in shown
    assert not (tmp_path / "runs").exists()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"hashes.json"}


def test_a_map_takes_longer_where_its_kernels_were_never_compiled(tmp_path, monkeypatch):
    rates, drawn, undrawn = Rates(1.0, 1.0, 1.0, 1.0, 1.0), Cost(points=1024), Cost()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first = rates.seconds(drawn)
    unaffected = rates.seconds(undrawn)
    (tmp_path / "pynndescent_1a2b").mkdir()
    (tmp_path / "pynndescent_1a2b" / "distances.hamming-1.py311.nbi").touch()
    assert first - rates.seconds(drawn) == pytest.approx(COMPILING)
    assert rates.seconds(undrawn) == unaffected


def test_the_plan_names_settings_that_shorten_evaluate(planned):
    checked, steps = planned("stage=evaluate")
    all_, most, none = costs_of(steps, checked)["evaluate"], *(cost for _, cost in fewer_baselines(checked))
    assert [words for words, _ in fewer_baselines(checked)] == [
        "evaluate.baselines=[unaligned,static_mask,random_router,cmoe]",
        "evaluate.baselines=[]",
    ]
    assert none.products < 0.6 * most.products < 0.6 * all_.products
    assert [words for words, _ in fewer_baselines(planned("evaluate.baselines=[cmoe]")[0])] == ["evaluate.baselines=[]"]
    assert [*fewer_baselines(planned("evaluate.baselines=[]")[0])] == []


def test_the_processes_of_a_machine_share_its_memory(planned, monkeypatch):
    places = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("stages.calibration.token_memory.free_memory", lambda: 4000)
    sizes = sizes_of(planned("stage=scan")[0], on_host=True)
    assert (sizes.processes, sizes.room) == (8, 1000)


def test_hidden_states_above_the_limit_are_on_disk(planned):
    """Hidden states above the limit count as disk space instead of memory, and the plan says so."""
    words = ("cluster.map=none", "data.tokens=131072", "vocabulary=none", "project=align")
    inside, outside = (costs(planned, *words, f"model.hidden_memory={room}GB") for room in (100, 0))
    for stage, tokens in (("cluster", 16384), ("assemble", 16384), ("project", 131072)):
        kept = 3 * 4 * 256 * tokens
        assert (inside[stage].spilled, outside[stage].spilled) == (0, kept), stage
        assert inside[stage].device - outside[stage].device == pytest.approx(kept, rel=0.05), stage
    (said,) = describe_temporary("hidden states", {"project": outside["project"].spilled, "scan": 0})
    assert said == "hidden states, temporarily on the disk of output_dir: 384.0 MiB in stage=project"
    assert [*describe_temporary("hidden states", {"project": inside["project"].spilled})] == []


def test_a_layer_that_stays_dense_costs_no_carving(planned):
    words = ("project=align", "experts=12", "n=64", "always_on=256", "top_k=4", "evaluate.baselines=[]")
    words += ("evaluate.speed_tokens=0", "evaluate.layer_tokens=0", "data.heldout_tokens=1024", "cluster.map=none")
    words += ("active=0.75", "assemble.target=tiny_onn")
    all_carved, half = (costs(planned, *words, f"dense_layers={kept}") for kept in ("[]", "[0,-1]"))
    assert half["scan"] == all_carved["scan"]
    assert half["extract"].written == pytest.approx(all_carved["extract"].written / 2)
    for stage in ("cluster", "assemble", "project"):
        assert half[stage].solves == pytest.approx(all_carved[stage].solves / 2), stage
        assert half[stage].cells == pytest.approx(all_carved[stage].cells / 2), stage
    # Two layers: the carved model computes 1024 neurons instead of 512, and no comparison with the dense FFN is made.
    saved = 2 * 1024 * (6 * 256 * (1024 - (1024 - 512)) + 2 * 12 * 64**2)
    assert all_carved["evaluate"].products - half["evaluate"].products == pytest.approx(saved)


def test_held_out_text_that_a_training_reads_is_in_the_plan(planned):
    """A short training reads more of it than of the text: of 24 steps, 2 for routers and 22 for all parameters."""
    words = ("stage=train", "train=heal", "train.tokens=6144", "train.batch=2", "train.micro_batch=2")
    words += ("train.log_steps=3", "train.straight_through=false", "data.max_length=128", "data.heldout_tokens=4096")
    words += ("train.router_share=0.1", "train.all_share=0.9")
    found = [
        costs(planned, *words, f"train.heldout_sequences={count}", f"train.heldout_steps={every}")["train"].products
        for count, every in ((20, 7), (10, 7), (20, 0), (40, 7))
    ]
    checked, _ = planned(*words)
    sizes = sizes_of(checked, on_host=True)
    dense, carved = (forward(sizes, 1280, width).products for width in (None, sizes.active))
    # Before training, after step 2, after 9, 18 and 22 of the other phase; without steps between, before and after.
    assert found[0] - found[1] == pytest.approx(dense + 5 * (carved + dense))
    assert found[0] - found[2] == pytest.approx(2 * 2 * (carved + dense))
    assert found[3] - found[0] == pytest.approx((4096 - 2560) / 2560 * 2 * (found[0] - found[1]))


@pytest.mark.slow
def test_formulas_agree_with_what_torch_counts(planned, tmp_path, monkeypatch):
    words = ["debug=tiny", "data.tokens=8192", "data.sample_tokens=4096"]
    predicted, counted, run_step = costs(planned, *words), {}, Runner.run_step

    def run_counted(runner, step):
        with FlopCounterMode(display=False) as counter:
            run_step(runner, step)
        counted[step.stage.name] = counter.get_total_flops()

    monkeypatch.setattr(Runner, "run_step", run_counted)
    assert run_command([*words, f"output_dir={tmp_path}"]) == 0
    for stage in ("scan", "cluster", "assemble", "project", "evaluate"):
        assert predicted[stage].products == pytest.approx(counted[stage], rel=0.3), stage
