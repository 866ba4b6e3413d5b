"""Batches shared by several workers: sums, solutions and layers equal those of one process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draws import draw
from integration.forked import as_workers
from pico import write_pico

from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter
from models.stream import LayerStream
from stages.artifacts.job import ALONE
from stages.calibration.alignment import align_down, column_scale, relative_error
from stages.calibration.batches import TokenStream, deal_layers, passed_losses
from stages.calibration.share import Share, evenly_spaced, take_tokens
from stages.routing.task import load_balance, make_loop, set_logit_std
from stages.text.batches import TokenSequence, batch_sequences

D, F, E, N, S, K = 6, 13, 3, 4, 2, 2
SIZES = [7, 5, 9, 4, 8]
SETTINGS = SimpleNamespace(penalties=[0.1, 0.01], validation_share=0.4, validate=True)


BATCHES = [draw(size, D, seed=size) for size in SIZES]
FFN = DenseFFN(draw(F, D, seed=1), draw(F, D, seed=2), draw(D, F, seed=3), torch.nn.functional.silu)


def loop_of(copies):
    neurons_EN = torch.arange(E * N).view(E, N) % (F - S) if copies else torch.arange(9).view(E, 3)
    always_S = torch.arange(F - S, F)
    loop = make_loop(FFN, neurons_EN, always_S, LinearRouter.without_bias(0.3 * draw(E, D, seed=4)), K)
    return replace(loop, gate=GateKind.SOFTMAX_OF_CHOSEN)


def shared(workers, batches=BATCHES):
    """Three batches of text and two of random tokens."""
    mine = batches[workers.rank :: workers.world]
    return Share(mine, [len(batch) for batch in batches], batches[0][:0], workers, sources=[""] * 3)


@pytest.mark.parametrize("world", [2, pytest.param(6, marks=pytest.mark.slow)])  # 6: more workers than batches
def test_workers_find_what_one_process_finds(world):
    def work(workers):
        share = shared(workers)
        for loop in map(loop_of, (False, True)):
            wanted, mine = [FFN(x_TD) for x_TD in BATCHES], share.map(FFN)
            assert torch.equal(column_scale(loop, share), column_scale(loop, BATCHES))
            error = relative_error(loop, BATCHES, wanted, [1, 3])
            assert relative_error(loop, share, mine, [1, 3]) == error > 0
            alone, found = (
                align_down(loop, inputs, outputs, SETTINGS)
                for inputs, outputs in ((shared(ALONE), wanted), (share, mine))
            )
            assert alone.error == relative_error(alone.carved, BATCHES, wanted, [1, 3])
            assert found.penalty == alone.penalty
            assert found.error == pytest.approx(alone.error, rel=1e-6)
            torch.testing.assert_close(found.carved.experts.down_EDN, alone.carved.experts.down_EDN, rtol=0, atol=1e-6)
            routers = [set_logit_std(loop.router, inputs, 0.7).rows_ED for inputs in (share.only_text(), BATCHES[:3])]
            assert torch.equal(*routers)
            assert torch.equal(
                load_balance(loop.router, share, K, [0, 4]), load_balance(loop.router, [BATCHES[0], BATCHES[4]], K)
            )

    as_workers(world, work)


def test_tokens_are_taken_alike_and_gathered_in_order_where_they_are_wanted():
    def work(workers):
        share = shared(workers)
        taken, doubled = take_tokens(share, [2 * x_TD for x_TD in share], 16)
        assert [len(one.sources) for one in (share, share.map(FFN), taken, share.only_text())] == [3] * 4
        expected, _ = take_tokens(BATCHES, BATCHES, 16)
        assert taken.tokens == expected.tokens == sum(map(len, expected)) < sum(SIZES)
        gathered = taken.gather(at=1), doubled.gather(at=1)
        for factor, batches in zip((1, 2), gathered, strict=True):
            assert len(batches) == (len(SIZES) if workers.rank == 1 else 0)
            for found, batch in zip(batches, expected, strict=False):
                assert torch.equal(found, factor * batch)

    as_workers(3, work)


class CountingStream(LayerStream):
    """Records the layer of every batch that passes an FFN."""

    def layers(self):
        self.ran = []
        for index, layer in enumerate(super().layers()):
            act = layer.ffn.act
            layer.ffn = replace(layer.ffn, act=lambda h_TF, at=index, act=act: self.ran.append(at) or act(h_TF))
            yield layer


def test_each_layer_is_dealt_to_one_worker_with_all_tokens(tmp_path):
    folder = write_pico(tmp_path, "qwen3", layers=5)
    rows = [torch.randint(1, 61, (9,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
    batches = batch_sequences([TokenSequence(str(index), row, row) for index, row in enumerate(rows)], 9, 0)
    few = [batches[0], *(replace(batch, layers=3) for batch in batches[1:])]
    with CountingStream(folder, device=torch.device("cpu")) as stream:
        alone = [list(dealt.inputs) for dealt in deal_layers(stream, few, ALONE)]
    assert list(map(len, alone)) == [4, 4, 4, 1, 1]
    assert stream.ran == [0] * 4 + [1] * 4 + [2] * 4 + [3]  # nothing reads the last layer's outputs

    def work(workers):
        with LayerStream(folder, device=torch.device("cpu")) as stream:
            turns = [dealt and replace(dealt, inputs=list(dealt.inputs)) for dealt in deal_layers(stream, few, workers)]
            assert [dealt and dealt.index for dealt in turns] == ([0, 2, 4] if workers.rank == 0 else [1, 3, None])
            for dealt in filter(None, turns):
                assert all(map(torch.equal, dealt.inputs, alone[dealt.index]))
        with LayerStream(folder, device=torch.device("cpu")) as stream:
            tokens = TokenStream(stream, batches, workers)
            for layer in stream.layers():
                tokens.enter(layer)
                tokens.leave(map(layer.ffn, tokens.inputs))
            losses = workers.gather(passed_losses({"": tokens}, stream, batches, workers)[""])
            assert losses[0] == losses[1]
            assert losses[0].tokens == 4 * 8

    as_workers(2, work)


@pytest.mark.parametrize(
    ("count", "wanted", "expected"), [(9, 3, [0, 4, 8]), (3, 7, [0, 1, 2]), (5, 0, [0]), (4, 1, [0]), (1, 1, [0])]
)
def test_tokens_are_spread_from_the_first_to_the_last(count, wanted, expected):
    assert evenly_spaced(count, wanted).tolist() == expected


def test_every_batch_gives_the_same_part():
    batches = [torch.arange(count).float()[:, None] for count in (20, 40, 1)]
    inputs, outputs = take_tokens(batches, [-batch_T1 for batch_T1 in batches], 30)
    assert [len(part_t1) for part_t1 in inputs] == [10, 20, 1]
    assert all(torch.equal(y_t1, -x_t1) for x_t1, y_t1 in zip(inputs, outputs, strict=True))
    assert torch.equal(inputs[1][:, 0].long(), evenly_spaced(40, 20))
    assert [len(part_t1) for part_t1 in take_tokens(batches, batches, 99)[0]] == [20, 40, 1]
