"""Taylor sums by text domain: the same through every store, after an interruption, and as a view of the neurons."""

from unittest.mock import patch

import pytest
import torch
from integration.redis_server import running
from pico import write_pico
from safetensors.torch import load_file

from pipeline.cli import run_command
from stages.artifacts.statistics import DomainStatistics, NeuronStatistics
from stages.scan.passes import Scanner

L, F = 2, 40


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A scan of ten batches of a folder of three files, in batches of two sequences of any of them."""
    folder = tmp_path_factory.mktemp("source")
    write_pico(folder / "pico", "qwen3", layers=L, intermediate=F, tokenizer=True)
    (folder / "texts").mkdir()
    for name, word in (("birds", "sparrow"), ("fish", "herring"), ("trees", "hornbeam")):
        lines = (f"{word} {number} met {word} {number * 7 % 31} near house {number % 9}." for number in range(200))
        (folder / "texts" / f"{name}.txt").write_text("\n\n".join(lines))
    (folder / "heldout.txt").write_text("No bird was met.")
    return [
        *("model=local", f"model.path={folder / 'pico'}", "model.label=pico", "scan.domains=true"),
        *("data=text", f"data.path={folder / 'texts'}", f"data.heldout_path={folder / 'heldout.txt'}"),
        *("data.tokens=1000", "data.heldout_tokens=100", "data.max_length=50", "scan.batch_tokens=100"),
        *("store.checkpoint_every=0", "scan.reservoir_tokens=40", "data.packing=single"),
    ]


def scan(words, outputs):
    assert run_command([*words, "stage=scan", f"output_dir={outputs}"]) == 0
    (folder,) = (outputs / "artifacts" / "pico" / "scan").glob("[!.]*")
    return folder


@pytest.fixture(scope="module")
def outputs(words, tmp_path_factory):
    """Of a scan that nobody disturbed."""
    outputs = tmp_path_factory.mktemp("whole")
    scan(words, outputs)
    return outputs


@pytest.fixture(scope="module")
def whole(words, outputs):
    return scan(words, outputs)


def test_the_domains_are_the_files_and_add_up(whole):
    domains, statistics = DomainStatistics.load(whole), NeuronStatistics.load(whole)
    assert sorted(domains.names) == ["birds", "fish", "trees"]
    assert sum(domains.samples) == statistics.samples
    assert domains.sum_taylor.shape == (3, L, F)
    assert (domains.sum_taylor.sum(2) > 0).all()
    torch.testing.assert_close(domains.sum_taylor.sum(0), statistics.sum_taylor, rtol=1e-6, atol=0)


def test_an_interrupted_scan_counts_every_sample_once(words, whole, tmp_path):
    original, left = Scanner.scan, [4]

    def counted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with patch.object(Scanner, "scan", counted):
        assert run_command([*words, "stage=scan", f"output_dir={tmp_path}"]) != 0
    assert left == [0]
    found = scan(words, tmp_path) / DomainStatistics.FILE
    assert torch.equal(load_file(found)["sum_taylor"], load_file(whole / DomainStatistics.FILE)["sum_taylor"])


def test_redis_keeps_the_domains_apart(words, whole, tmp_path):
    with running(tmp_path / "redis") as server:
        found = DomainStatistics.load(scan([*words, "store=redis", f"store.url={server.url}"], tmp_path))
        with server.client(decode_responses=True) as client:
            (key,) = client.scan_iter("*layers.1.mlp.gate_proj.weight:row:7", count=10**6)
            row = client.hgetall(key)
    expected = DomainStatistics.load(whole)
    assert (found.names, found.samples) == (expected.names, expected.samples)
    torch.testing.assert_close(found.sum_taylor, expected.sum_taylor, rtol=1e-9, atol=0)
    names = {name.removesuffix("_tiny") for name in row if name.startswith("taylor_domain_")}
    assert names == {f"taylor_domain_{number:02}" for number in range(3)}


@pytest.mark.parametrize("views", [["taylor_profile"], ["taylor_profile", "contribution", "coactivation"]])
def test_neurons_are_grouped_by_their_domains(words, outputs, whole, views):
    features = "taylor_profile" if len(views) == 1 else "joint"
    more = ["stage=cluster", "experts=4", "n=8", "cluster.map=none", f"cluster.features={features}"]
    more += [f"cluster.joint_views={views}".replace("'", "").replace(" ", "")] if features == "joint" else []
    assert run_command([*words, *more, f"output_dir={outputs}"]) == 0


def test_gradients_are_needed(words, tmp_path, capsys):
    assert run_command([*words, "stage=scan", "scan.gradients=false", f"output_dir={tmp_path}"]) != 0
    assert (
        "scan.domains=true sums Taylor scores by text domain, and scan.gradients=false computes none\n"
        "  where: settings scan.domains and scan.gradients\n"
        "  do:    scan.gradients=true, or scan.domains=false"
    ) in capsys.readouterr().err
