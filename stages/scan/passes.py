"""The dense model over all batches: one pass each, its checks, and the share of every worker."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from instruments.errors import CheckpointError, NumericsError
from instruments.ffn_probe import GatedFFN, probe_gradients, probe_hidden
from stages.accumulators.sums import LocalStore, ScanSums, SumStore
from stages.artifacts.job import Workers
from stages.losses import forward_losses, supervised_tokens
from stages.scan.batch_sums import BatchSums, HostBatch
from stages.scan.config import ScanConfig
from stages.scan.parameters import ParameterRecorder
from stages.text.sequences import TokenBatch


def check_losses(losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module) -> None:
    """Refuse losses that are not finite, naming the weights that are to blame, or else the samples."""
    bad_B = ~losses_B.isfinite()
    if not bad_B.any():
        return
    _refuse(supervised_tokens(batch.labels) == 0, batch, "no token counts in the loss", _NO_LABEL)
    check_weights(model)
    _refuse(bad_B, batch, "the loss is not finite", "scan in another format: model.dtype=float32")


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not finite, naming the tensors."""
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.device.type != "meta" and not weight.isfinite().all()
    ]
    if bad:
        raise CheckpointError(
            f"{len(bad)} tensors hold weights that are not finite",
            where=", ".join(bad[:3]) + (" ..." if len(bad) > 3 else ""),
            do="download or copy the checkpoint again, or model.dtype=float32 if its numbers are too large for float16",
        )


def check_gradients(
    totals_B: Float[Tensor, "B"], losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module
) -> None:
    """Refuse samples whose Σ‖∇‖ over all layers is zero or not finite, naming them and the likely cause."""
    _refuse(~totals_B.isfinite(), batch, "the gradients are not finite", _TOO_LARGE)
    silent_B = totals_B == 0
    _refuse(silent_B & (losses_B == 0), batch, "the loss is exactly zero, and so are all gradients", _NO_LOSS)
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    _refuse(silent_B, batch, "all gradients are zero", _UNDERFLOW if dtype != torch.float32 else _NO_PATH)


_NO_LABEL = (
    "leave these samples out: every label is masked, or the only one stands at the first token, which nothing predicts"
)
_TOO_LARGE = "model.dtype=float32; if it is, the checkpoint's weights are scaled beyond its range"
_NO_LOSS = "leave these samples out: the model is certain of every supervised token (a single one, perhaps)"
_UNDERFLOW = "model.dtype=float32: gradients this small vanish in half precision"
_NO_PATH = "check that the checkpoint's FFN weights are not all zero"


def _refuse(bad_B: Bool[Tensor, "B"], batch: TokenBatch, what: str, do: str) -> None:
    names = [name for name, bad in zip(batch.names, bad_B.tolist(), strict=True) if bad]
    if names:
        raise NumericsError(f"{what} in {len(names)} of {len(batch.names)} samples", where=", ".join(names), do=do)


# Gradients of a mean over tokens vanish in float16 below 6e-8. A power of two costs no accuracy.
_HALF_LOSS_SCALE = 2.0**12


@dataclass(frozen=True)
class Scanner:
    """A model, and how its neurons are measured."""

    model: nn.Module  # a causal language model, all weights frozen
    mlps: Sequence[GatedFFN]  # its gated FFNs, in layer order
    settings: ScanConfig
    parameters: ParameterRecorder | None = None  # also record every weight

    def scan(self, batch: TokenBatch, slots_BT: Tensor, sums: ScanSums, *, number: int, first_sample: int = 0) -> None:
        """Add batch `number` of the scan to `sums`, or nothing where it fails.

        Every sample's loss is its own mean, so a batch of B equals B batches of one. `slots_BT` are its tokens' slots
        of the reservoir, -1 for none; `first_sample` is the number of its first sequence.

        Raises:
            CheckpointError: weights are not finite.
            NumericsError: a sample's loss or gradients are not finite, or all its gradients are zero.
        """
        # 4-bit layers compute in the format of the embeddings, too.
        dtype = self.model.get_input_embeddings().weight.dtype  # type: ignore[operator]
        loss_scale = _HALF_LOSS_SCALE if self.settings.gradients and dtype == torch.float16 else 1.0
        found = self._measure(batch, slots_BT, loss_scale)
        check_losses(found.losses_B, batch, self.model)
        # Too large for float16. Every batch begins at the full scale: its sums depend on nothing but itself.
        while not self._is_usable(found, last=loss_scale == 1):
            loss_scale /= 16
            found = self._measure(batch, slots_BT, loss_scale)
        if self.settings.gradients:
            check_gradients(found.totals_B, found.losses_B, batch, self.model)
        if self.parameters:
            self.parameters.keep(first_sample, loss_scale)
        counters = {
            "tokens": batch.tokens,
            "samples": len(batch.names),
            "loss_sum": float(found.losses_B.double().sum()),
        }
        found.add_to(sums, number=number, counters=counters, loss_scale=loss_scale)

    def _is_usable(self, found: HostBatch, *, last: bool) -> bool:
        """Whether every gradient fitted the number format; the last try is used as it is, and checked afterwards."""
        recorded = self.parameters is None or self.parameters.take(last=last)
        return last or (recorded and bool(found.totals_B.isfinite().all()))

    def _measure(self, batch: TokenBatch, slots_BT: Tensor, loss_scale: float) -> HostBatch:
        if self.parameters:
            self.parameters.expect(batch.names)
        sums = BatchSums(len(self.mlps), batch.attention_mask.bool(), slots_BT, self.settings)
        if self.settings.gradients:
            with probe_gradients(self.mlps, sums.add_gradients), torch.enable_grad():
                losses_B = forward_losses(self.model, batch, inplace_backward_logits=True)
                (losses_B.sum() * loss_scale).backward()  # type: ignore[no-untyped-call]
        else:
            with probe_hidden(self.mlps, sums.add_hidden), torch.no_grad():
                losses_B = forward_losses(self.model, batch)
        return sums.to_host(losses_B.detach())


def draw_reservoir(total_tokens: int, size: int, seed: int) -> Int[Tensor, "M"]:
    """Slot of each of the stream's M tokens, -1 for those not drawn.

    All tokens are known before the scan starts, so the draw is made at once: uniform without replacement, and the same
    for any batch size and after any interruption of the scan.
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
    layers = (np.unpackbits(bits_Rf, axis=1, count=width) for bits_Rf in bits_LRf.numpy())
    return torch.stack([torch.from_numpy(np.packbits(bits_RF.T, axis=1)) for bits_RF in layers])


def agree_on_done(store: SumStore, workers: Workers) -> set[int]:
    """Batches that nobody needs to read again; the same answer for every worker.

    Where each worker keeps its own sums, one that finds batches of its own with a lower-numbered worker forgets all it
    has: its sums were made in an earlier run whose other part this run could not see.
    """
    parts = workers.share(store.done())
    agreed: set[int] = set()
    for rank, part in enumerate(parts):
        if store.shared or not part & agreed:
            agreed |= part
        elif rank == workers.rank and isinstance(store, LocalStore):
            store.forget()
    return agreed


def number_samples(batches: Sequence[TokenBatch], numbers: Collection[int]) -> list[int]:
    """Numbers of the samples of some batches, among all of the scan."""
    firsts = [0, *accumulate(len(batch.names) for batch in batches)]
    return [sample for number in sorted(numbers) for sample in range(firsts[number], firsts[number + 1])]


def scan_shares(
    scanner: Scanner,
    batches: Sequence[TokenBatch],
    slots_M: Tensor,
    store: SumStore,
    workers: Workers,
    *,
    after_batch: Callable[[int], object],
) -> None:
    """Read every batch of the scan that is not yet in the store; each worker takes every world-th of them.

    `slots_M` are the reservoir's slots of all tokens; `after_batch` is called with the number of tokens just read.
    """
    first_tokens = [0, *accumulate(batch.tokens for batch in batches)]
    first_samples = [0, *accumulate(len(batch.names) for batch in batches)]
    while missing := sorted(set(range(len(batches))) - agree_on_done(store, workers)):
        done: set[int] = set()
        share = missing[workers.rank :: workers.world]
        if store.shared and share:
            # Other jobs that flush to the same store, on other machines perhaps, have the same list; each begins
            # somewhere else, so that they meet late. Not seeded: no two are to draw the same.
            first = random.randrange(len(share))
            share = share[first:] + share[:first]
        for number in share:
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


def _flush(store: SumStore, scanner: Scanner) -> None:
    # Parameters first: read again they do no harm, missing they do.
    if scanner.parameters:
        scanner.parameters.writer.seal()
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
