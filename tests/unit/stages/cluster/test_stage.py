import threading
from dataclasses import replace

import pytest
import torch
from pico import write_pico

from instruments.errors import ConfigError
from models.config import ModelConfig, MoEShape
from stages.artifacts.carve import Partition, Scores
from stages.artifacts.job import Job
from stages.artifacts.tensor_file import layer_file
from stages.calibration.config import VocabularyConfig
from stages.cluster.config import ClusterConfig
from stages.cluster.layer import partition_layer
from stages.cluster.stage import run, run_ahead
from stages.text.config import DataConfig

L, F = 2, 24
SHAPE = MoEShape(experts=3, n=6, top_k=2, always_on=5)


def grouped(**changes):
    """k-means on the scan's statistics, which needs no forward pass."""
    return ClusterConfig(**({"map": "none", "method": "balanced_kmeans"} | changes))


NOTHING = VocabularyConfig(tokens=0)
NO_MAP = grouped()


@pytest.fixture
def job(tmp_path):
    for name in ("scan", "score", "out", "scratch"):
        (tmp_path / name).mkdir()
    return Job({name: tmp_path / name for name in ("scan", "score")}, tmp_path / "out", tmp_path / "scratch")


@pytest.fixture
def scores():
    generator = torch.Generator().manual_seed(1)
    return Scores("s_p", "s_p in words", torch.rand(L, F, generator=generator))


@pytest.fixture
def planted(plant, job, scores):
    planted = plant(layers=L, width=F)
    planted.statistics.save(job.parents["scan"])
    scores.save(job.parents["score"])
    return planted


def cluster(job, config=NO_MAP, *, model=None, data=None, shape=SHAPE, seed=0):
    for kept in job.scratch.iterdir():
        kept.unlink()  # in a run, another recipe has its own scratch folder
    table = run(
        job,
        model=model or ModelConfig(),
        data=data or DataConfig(),
        vocabulary=NOTHING,
        cluster=config,
        shape=shape,
        seed=seed,
    )
    return table, Partition.load(job.out)


def test_always_on_neurons_are_those_of_highest_score(job, planted, scores):
    _table, partition = cluster(job)
    assert partition.width == F
    assert partition.neurons.dtype == partition.always_on.dtype == torch.int32
    assert torch.equal(partition.always_on.long(), scores.chosen.topk(5).indices.sort().values)


@pytest.mark.parametrize("method", ["balanced_kmeans", "rank", "random", "contiguous"])
def test_dropped_neurons_are_those_of_lowest_score(job, planted, scores, method):
    _table, partition = cluster(job, grouped(method=method))
    for layer in range(L):
        used = {*partition.neurons_of(layer).flatten().tolist(), *partition.always_on[layer].tolist()}
        assert set(range(F)) - used == {int(scores.chosen[layer].argmin())}


def test_the_table_says_what_each_layer_drops(job, planted, scores):
    table, partition = cluster(job)
    assert partition.sizes[:3] == (L, 3, 6)
    dropped_L = [F - 5 - len(neurons_EN.unique()) for neurons_EN in map(partition.neurons_of, range(L))]
    assert dropped_L == [1, 1]
    for layer, row in enumerate(table.rows):
        contribution_F = planted.statistics.contribution[layer]
        share = contribution_F[partition.always_on[layer].long()].sum() / contribution_F.sum()
        assert row[1] == f"{share:.1%}"
        assert row[2] == 1
        assert row[4] == 1


@pytest.mark.parametrize("method", ["rank", "random", "contiguous"])
def test_controls_find_no_structure(job, planted, method):
    _table, partition = cluster(job, grouped(method=method), shape=MoEShape(3, 8, 2, 0))
    assert (partition.multiplicity == 1).all()
    groups = [planted.group_LF[0, neurons_N.long()].unique() for neurons_N in partition.neurons_of(0)]
    assert min(map(len, groups)) > 1


@pytest.mark.parametrize("dense_layer", range(L))
def test_a_layer_that_stays_dense_is_not_grouped(job, planted, dense_layer):
    config = grouped(map="tsne", map_layers=[*range(L)])
    table, plain = cluster(job, config)
    pictures = {path.name for path in job.out.glob("*.png")}
    assert len(pictures) == len(table.rows) == L
    for path in job.out.iterdir():
        path.unlink()
    mixed, partition = cluster(job, config, shape=replace(SHAPE, dense_layers=(dense_layer,)))
    (carved,) = partition.carved_layers
    assert carved == 1 - dense_layer
    assert torch.equal(partition.neurons_of(carved), plain.neurons_of(carved))
    assert torch.equal(partition.always_on[carved], plain.always_on[carved])
    assert mixed.rows == [table.rows[carved]]
    assert [path.name for path in job.out.glob("*.png")] == [f"neuron_map_layer_{carved:03}.png"]
    assert len([*job.scratch.iterdir()]) == 1


def test_the_seed_decides(job, planted):
    config = grouped(method="random")
    first, again, other = (cluster(job, config, seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first.neurons, again.neurons)
    assert not torch.equal(first.neurons, other.neurons)


@pytest.mark.parametrize(("experts", "always_on"), [(1, 0), (3, 5), (5, 0)])
def test_a_pool_takes_the_neurons_of_highest_score_from_every_layer(job, planted, scores, experts, always_on):
    shape = MoEShape(experts, 6, 2, always_on, "global_pool")
    table, partition = cluster(job, shape=shape)
    assert partition.sizes == (L, experts, 6, always_on, F)
    assert (min(partition.given) == 0) == (experts < L)
    assert partition.multiplicity.max() == 1
    for layer, given in enumerate(partition.given):
        left_F = scores.chosen[layer].clone()
        left_F[partition.always_on[layer].long()] = -1
        assert set(partition.neurons_of(layer).flatten().tolist()) == set(left_F.topk(given * 6).indices.tolist())
    given = ", ".join(map(str, partition.given))
    assert f"experts that the layers give to the pool, by score: {given}" in table.notes


def test_a_pool_of_more_places_than_neurons_holds_all_of_them(job, planted):
    _table, partition = cluster(job, shape=MoEShape(11, 6, 2, 0, "global_pool"))
    assert sorted(partition.given) == [5, 6]
    assert (partition.multiplicity >= 1).all()


def test_maps_of_chosen_layers(job, planted):
    config = grouped(map="tsne", map_layers=[-1])
    table, with_map = cluster(job, config)
    picture = job.out / "neuron_map_layer_001.png"
    assert sorted(path.name for path in job.out.iterdir()) == [picture.name, Partition.FILE]
    assert table.notes[-1] == "maps: neuron_map_layer_001.png"
    first = picture.read_bytes()
    cluster(job, config)
    assert picture.read_bytes() == first
    _table, without = cluster(job)
    assert torch.equal(with_map.neurons, without.neurons)


def test_layers_that_a_killed_run_has_grouped_are_taken_from_it(job, planted, monkeypatch):
    table, whole = cluster(job)
    layer_file(job.scratch, 1).unlink()
    (job.out / Partition.FILE).unlink()
    grouped_now = []

    def watched(*given, **named):
        grouped_now.append(1)
        return partition_layer(*given, **named)

    monkeypatch.setattr("stages.cluster.stage.partition_layer", watched)
    again = run(job, model=ModelConfig(), data=DataConfig(), vocabulary=NOTHING, cluster=NO_MAP, shape=SHAPE, seed=0)
    assert (len(grouped_now), again) == (1, table)
    assert torch.equal(Partition.load(job.out).neurons, whole.neurons)


def test_no_bitmaps_to_compare(job, plant, scores):
    plant(layers=L, width=F, tokens=0).statistics.save(job.parents["scan"])
    scores.save(job.parents["score"])
    with pytest.raises(ConfigError) as error:
        cluster(job)
    assert error.value.do == "scan.reservoir_tokens=4096"
    cluster(job, grouped(method="rank"))


def test_layers_grouped_at_once_are_those_grouped_in_turn(job, planted, tmp_path, monkeypatch):
    folder = write_pico(tmp_path / "dense", "llama", layers=L, intermediate=F, tokenizer=True)
    dense = ModelConfig(kind="local", path=str(folder))
    data, results, config = DataConfig(tokens=96, max_length=32), [], grouped(method="router_aware", map="tsne")
    for threads in (1, 2):
        monkeypatch.setattr("stages.cluster.stage.count_threads", lambda *_facts, threads=threads: threads)
        table, partition = cluster(job, config, model=dense, data=data, shape=MoEShape(3, 8, 2, 5))
        pictures = {path.name: path.read_bytes() for path in job.out.glob("*.png")}
        results.append((table.rows, partition.neurons.tolist(), pictures))
    assert results[0] == results[1]


def test_calls_run_at_once_give_their_results_in_order():
    both = threading.Barrier(2, timeout=30)  # the first call waits for the second

    def first():
        both.wait()
        return "first"

    def second():
        both.wait()
        return "second"

    assert list(run_ahead([first, second, lambda: "third"], 2)) == ["first", "second", "third"]
    with pytest.raises(ZeroDivisionError):
        list(run_ahead([lambda: 1 // 0, lambda: 1], 2))
