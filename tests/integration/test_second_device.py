"""Every stage on a device other than the CPU: no operation mixes devices, and the results are the same.

No GPU is needed (see `simulated_device`). The number of times that the host waits for the device is bounded: a GPU is
idle meanwhile.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import simulated_device
from integration.carving import words_of_pico
from pico import write_pico

from stages.evaluate.config import BASELINES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(simulated_device.missing() is not None, reason=str(simulated_device.missing())),
]

LAYERS, BATCHES = 2, 36  # of calibration text, and of random tokens
FEW = ("experts=4", "n=8", "top_k=2", "always_on=8")
TRAIN = ("train.tokens=600", "train.batch=4", "train.micro_batch=2", "train.log_steps=1")
CHAIN = ("scan", "score", "cluster", "extract", "assemble", "project", "evaluate")
DIAGNOSE = "stage=diagnose"
OTHERS = {
    "every baseline": (*FEW, f"evaluate.baselines=[{','.join(BASELINES)}]"),
    "pool": ("stage=all", "topology=global_pool", "experts=6", "n=8", "top_k=2"),
    "small batches": ("stage=scan", "seed=1", "scan.batch_tokens=64", "store.checkpoint_every=1000"),
    "parameters": ("stage=scan", "scan=parameters"),
    "generated": ("stage=scan", "data.labels=generated", "data.prompt_tokens=8", "data.max_new_tokens=6",
                  "data.packing=single"),
    "train": ("stage=train", *FEW, *TRAIN),
    "distil": ("stage=train", "train=distil", "train.precision=bfloat16", *FEW, *TRAIN),
    "heal": ("stage=train", "train=heal", *FEW, *TRAIN),
    "dump": ("stage=dump",),
    "statistics": ("stage=dump", "dump.keep=statistics"),
    "auto_diff": (DIAGNOSE, "check=auto_diff"),
    "cast": (DIAGNOSE, "check=auto_diff", "diagnose.auto_diff.mode=cast"),
    "tensor": (DIAGNOSE, "check=analyze_tensor"),
}  # fmt: skip

# Most waits of the host in a stage: for each layer and calibration batch, and in addition. Copies of a batch or of a
# layer's weights to the device count, since their host memory is not pinned.
WAITS = {
    "scan": (0, 80),
    "score": (0, 0),
    "cluster": (2, 170),
    "extract": (0, 0),
    "assemble": (4, 60),
    "project": (5, 450),
    "evaluate": (5, 450),
    "train": (0, 760),
    "dump": (0, 90),
}


@pytest.fixture(scope="module")
def found(text, tmp_path_factory):
    """Run all cases in one process: case → output, exit code and waits."""
    folder = tmp_path_factory.mktemp("device")
    source = write_pico(folder / "qwen3", "qwen3", tie=True, tokenizer=True)
    quick = [*words_of_pico(source, text), "data.sample_tokens=null", "cluster.map=none", "evaluate.speed_tokens=100"]
    quick.append("model.rounded_products=false")  # a CPU with AMX would round
    quick.append("evaluate.samples=0")  # a token that is generated is waited for
    quick.append("project.router_steps=200")  # the default: waits are counted
    device = [*quick, "project.penalties=[0.1]", "model.device=simulated:0", f"output_dir={folder / 'device'}"]
    cases = {stage: [*device, *FEW, f"stage={stage}"] for stage in CHAIN}
    cases |= {name: [*device, *words] for name, words in OTHERS.items()}
    cases["cpu"] = [*cases["evaluate"], "model.device=cpu", f"output_dir={folder / 'cpu'}"]
    cases["nowhere"] = [*cases["scan"], "model.device=simulated:2", "fresh=true"]
    (folder / "cases.json").write_text(json.dumps(cases))
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-m", "simulated_device", folder / "cases.json", folder / "found.json"]
    subprocess.run(command, check=True, env=environment)
    return json.loads((folder / "found.json").read_text()) | {"folder": folder}


@pytest.mark.parametrize("case", [*CHAIN, *OTHERS, "cpu"])
def test_nothing_mixes_devices(found, case):
    assert found[case]["code"] == 0, found[case]["said"]


@pytest.mark.parametrize("stage", WAITS)
def test_the_host_waits_for_the_device_so_often_and_no_more(found, stage):
    each, besides = WAITS[stage]
    bound = each * LAYERS * BATCHES + besides
    waits = Counter(found[stage]["waits"])
    assert waits.total() <= bound, waits.most_common(12)
    assert bool(waits.total()) == bool(bound)  # a stage without tensors on the device never waits


def test_more_batches_of_a_scan_cost_no_wait(found):
    """Tokens reach a GPU from pinned memory, without a wait."""
    few, many = (
        {place: count for place, count in found[case]["waits"].items() if not place.startswith("copy from the host")}
        for case in ("scan", "small batches")
    )
    assert few == many


def test_results_are_those_of_the_cpu(found):
    device, cpu = (
        [
            json.loads(path.read_text())
            for path in (found["folder"] / place).glob("artifacts/*/evaluate/*/evaluation.json")
        ]
        for place in ("device", "cpu")
    )
    (expected,) = cpu
    kinds = expected["shape"], expected["models"].keys()
    (same,) = [one for one in device if (one["shape"], one["models"].keys()) == kinds]
    for name, figures in expected["models"].items():
        assert same["models"][name]["loss"] == pytest.approx(figures["loss"], abs=1e-5), name


def test_a_device_that_is_not_there_is_refused(found):
    assert found["nowhere"]["code"] == 2
    assert "device simulated:2 is not here: 2 GPUs found" in found["nowhere"]["said"]
