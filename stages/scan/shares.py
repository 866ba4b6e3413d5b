"""All batches of a scan, shared out among workers, each added to the sums once."""

import random
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stages.accumulators.accumulator import SumStore
from stages.accumulators.sums import ScanSums
from stages.artifacts.workers import Workers
from stages.scan.passes import Scanner
from stages.text.batches import TokenBatch


def draw_reservoir(total_tokens: int, size: int, seed: int) -> Int[Tensor, "M"]:
    """Slot of each of the stream's M tokens, -1 for those not drawn.

    All tokens are known before the scan starts, so the draw is made at once: uniform without replacement, and the same
    whatever the batch size and wherever a scan was interrupted.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(total_tokens, generator=generator)[:size].sort().values
    slots = torch.full((total_tokens,), -1, dtype=torch.int64)
    slots[drawn] = torch.arange(len(drawn))
    return slots


def slots_of_batch(slots_M: Int[Tensor, "M"], first: int, mask_BT: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Reservoir slots of one batch, whose first real token is number `first` of the stream; -1 on padding."""
    slots_BT = torch.full(mask_BT.shape, -1, dtype=torch.int64)
    slots_BT[mask_BT] = slots_M[first : first + int(mask_BT.sum())]
    return slots_BT


def token_to_neuron_major(bits_LRf: Tensor, width: int) -> Tensor:
    """Turn packed rows of tokens, (L, R, ceil(F/8)), into packed rows of neurons, (L, F, ceil(R/8)), layer by layer."""
    turned = []
    for bits_Rf in bits_LRf.numpy():
        bits_RF = np.unpackbits(bits_Rf, axis=1, count=width)
        turned.append(torch.from_numpy(np.packbits(bits_RF.T, axis=1)))
    return torch.stack(turned)


def agree_on_done(store: SumStore, workers: Workers) -> set[int]:
    """Batches that nobody needs to read again; the same answer for every worker.

    Where each worker keeps its own sums, one that finds batches of its own with a lower-numbered worker forgets all it
    has: its sums were made in an earlier run whose other part this run could not see.
    """
    parts = workers.share(store.done())
    agreed: set[int] = set()
    for rank, part in enumerate(parts):
        if not store.shared and part & agreed:
            if rank == workers.rank:
                store.forget()
            continue
        agreed |= part
    return agreed


def number_samples(batches: Sequence[TokenBatch], numbers: Collection[int]) -> list[int]:
    """Numbers of the samples of some batches, among all of the scan."""
    ends = list(accumulate(len(batch.names) for batch in batches))
    return [
        sample
        for number in sorted(numbers)
        for sample in range(ends[number] - len(batches[number].names), ends[number])
    ]


def scan_shares(
    scanner: Scanner,
    batches: Sequence[TokenBatch],
    slots_M: Tensor,
    store: SumStore,
    workers: Workers,
    *,
    after_batch: Callable[[int], object],
) -> None:
    """Read every batch that is not yet in the store; each worker takes every world-th of them.

    Args:
        scanner: the model.
        batches: of the whole scan.
        slots_M: reservoir slot of every token of the whole scan, -1 for none.
        store: keeps the sums.
        workers: who shares the work.
        after_batch: called with the number of tokens just read.
    """
    first_tokens = [0, *accumulate(batch.tokens for batch in batches)]
    first_samples = [0, *accumulate(len(batch.names) for batch in batches)]
    while missing := sorted(set(range(len(batches))) - agree_on_done(store, workers)):
        done: set[int] = set()
        for number in order_share(missing[workers.rank :: workers.world], store):
            if number in done:
                continue
            batch = batches[number]
            slots_BT = slots_of_batch(slots_M, first_tokens[number], batch.attention_mask.bool())
            scanner.scan(batch, slots_BT, store.sums, number=number, first_sample=first_samples[number])
            after_batch(batch.tokens)
            if store.due():
                _flush(store, scanner)
                done = store.done() if store.shared else done
        _flush(store, scanner)


def order_share(numbers: Sequence[int], store: SumStore) -> Sequence[int]:
    """The order in which a worker reads its batches.

    Other jobs that flush to the same store, on other machines perhaps, have the same list; each begins somewhere else,
    so that they meet late.
    """
    if not (store.shared and numbers):
        return numbers
    first = random.randrange(len(numbers))  # not seeded: no two jobs are to draw the same
    return [*numbers[first:], *numbers[:first]]


def _flush(store: SumStore, scanner: Scanner) -> None:
    # Parameters first: read again they do no harm, missing they do.
    if scanner.parameters:
        scanner.parameters.seal()
    store.flush()


def collect_sums(store: SumStore, workers: Workers) -> ScanSums | None:
    """The sums of all workers, at the leading one; None elsewhere.

    Numerics: integers, maxima and bits do not depend on the number of workers; float64 sums do by their rounding.
    """
    if store.shared:
        workers.share(None)  # nobody reads before everybody has flushed
        return store.collect() if workers.leads else None
    part = store.collect()
    if workers.world > 1:
        part = ScanSums({name: value.clone() for name, value in part.tensors.items()}, part.counters, part.done)
    for name in sorted(part.tensors):  # everybody in the same order, also one who read them from a file
        # Each token's bits are with one worker, so that adding them up unites them.
        workers.reduce_(part.tensors[name], maximum=name == "max_abs")
    others = workers.share((part.counters, part.done))
    if not workers.leads:
        return None
    counters = {name: sum(counts.get(name, 0) for counts, _ in others) for name in part.counters}
    return ScanSums(part.tensors, counters, set().union(*(done for _, done in others)))
