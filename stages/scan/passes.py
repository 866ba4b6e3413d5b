"""Passes of the dense model over all batches: measurements, checks, and distribution over workers."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from instruments.device import is_launch_bound, rounded_products
from instruments.errors import CheckpointError, NumericsError, some
from instruments.ffn_probe import GatedFFN, probe_gradients, probe_hidden
from models.loading import input_device
from stages.accumulators.sums import LocalStore, ScanSums, SumStore
from stages.artifacts.job import Workers
from stages.losses import forward_losses, supervised_tokens
from stages.scan.batch_sums import BatchSums, RunningSums, ScannedBatch
from stages.scan.config import ScanConfig
from stages.scan.parameters import ParameterRecorder
from stages.text.batches import TokenBatch

# Largest difference of equal logits, in standard deviations: rounding in few bits makes some.
SAME_LOGITS = 0.05
# Nats above the loss of chance: random weights have less.
WORSE_THAN_CHANCE = 2.0


def check_losses(losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module) -> None:
    """Refuse non-finite losses; the error names the non-finite weights, or the samples if all weights are finite."""
    bad_B = ~losses_B.isfinite()
    if not bad_B.any():
        return
    do = "leave these samples out: every label is masked, or the only one is at the first token, which nothing predicts"
    _refuse(supervised_tokens(batch.labels) == 0, batch, "no token counts in the loss", do)
    broken = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.device.type != "meta" and not weight.isfinite().all()
    ]
    if broken:
        what = f"{len(broken)} tensors hold weights that are not finite"
        do = "download or copy the checkpoint again, or model.dtype=float32 if its numbers are too large for float16"
        raise CheckpointError(what, where=some(broken, 3, ", "), do=do)
    _refuse(bad_B, batch, "the loss is not finite", "scan in another format: model.dtype=float32")


def check_mean_loss(nats: float, model: PreTrainedModel) -> None:
    """Refuse a model that predicts the text far worse than chance. Raises CheckpointError."""
    chance = math.log(model.get_input_embeddings().weight.shape[0])
    if nats > chance + WORSE_THAN_CHANCE:
        what = f"the dense model's mean loss is {nats:.2f} nats, and that of chance {chance:.2f}"
        do = "weights, config.json and tokenizer of one model; model.dtype=float32 if its numbers are too large"
        raise CheckpointError(what, where=f"{type(model).__name__} on the calibration text", do=do)


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model whose earlier tokens depend on a later one: two sequences that differ in the last token show it.

    Raises CheckpointError.
    """
    ids_BT = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]], device=input_device(model))
    logits_BTV = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False).logits[:, :-1].float()
    if bool((logits_BTV[0] - logits_BTV[1]).abs().max() > SAME_LOGITS * logits_BTV.std()):
        what, do = "earlier tokens see later ones: this is no model of the next token", "choose a causal language model"
        raise CheckpointError(
            what, where=f"{type(model).__name__}, by two sequences that differ in the last token", do=do
        )


def check_gradients(totals_B: Float[Tensor, "B"], losses_B: Float[Tensor, "B"], batch: TokenBatch) -> None:
    """Refuse samples whose Σ‖∇‖ over all layers is zero or not finite, naming them and the likely cause."""
    do = "model.dtype=float32; if it is, the checkpoint's weights are scaled beyond its range"
    _refuse(~totals_B.isfinite(), batch, "the gradients are not finite", do)
    silent_B = totals_B == 0
    do = "leave these samples out: the model is certain of every supervised token (a single one, perhaps)"
    _refuse(silent_B & (losses_B == 0), batch, "the loss is exactly zero, and so are all gradients", do)
    do = "model.dtype=float32, as small gradients vanish in half precision; or check that FFN weights are not all zero"
    _refuse(silent_B, batch, "all gradients are zero", do)


def _refuse(bad_B: Bool[Tensor, "B"], batch: TokenBatch, what: str, do: str) -> None:
    names = [name for name, bad in zip(batch.names, bad_B.tolist(), strict=True) if bad]
    if names:
        raise NumericsError(f"{what} in {len(names)} of {len(batch.names)} samples", where=", ".join(names), do=do)


# Gradients of a mean over tokens vanish in float16 below 6e-8. A power of two costs no accuracy.
_HALF_LOSS_SCALE = 2.0**12


@dataclass
class Scanner:
    """Measures a model's neurons batch by batch; their sums stay on its device until `drain`."""

    model: nn.Module  # a causal language model, all weights frozen
    mlps: Sequence[GatedFFN]  # its gated FFNs, in layer order
    settings: ScanConfig
    parameters: ParameterRecorder | None = None  # None without scan.parameters
    _running: RunningSums | None = field(default=None, init=False)

    def scan(self, batch: TokenBatch, slots_BT: Tensor, sums: ScanSums, *, number: int, first_sample: int = 0) -> None:
        """Read batch `number` of the scan for `sums`, to which `drain` adds it.

        Each sample has its own mean loss, so a batch of B equals B batches of one. `slots_BT` holds the reservoir slot
        of each token, -1 for none; `first_sample` is the number of the batch's first sequence. A GPU's batches are
        checked by `drain`, since the host would wait for each of them; other batches here.

        Raises:
            CheckpointError: weights are not finite.
            NumericsError: a sample's loss or gradients are not finite, or all its gradients are zero.
        """
        # 4-bit layers also compute in the number format of the embeddings.
        dtype = self.model.get_input_embeddings().weight.dtype  # type: ignore[operator]
        loss_scale = _HALF_LOSS_SCALE if self.settings.gradients and dtype == torch.float16 else 1.0
        found = self._measure(batch, slots_BT, loss_scale)
        at_once = self.parameters is not None or loss_scale > 1 or not is_launch_bound(found.losses_B.device)
        if at_once:
            losses_B, totals_B = found.fetch()
            check_losses(losses_B, batch, self.model)
            # Overflow in float16: try a smaller scale. Every batch starts at the full scale, so that its sums do not
            # depend on other batches.
            while not self._is_usable(totals_B, last=loss_scale == 1):
                loss_scale /= 16
                found = self._measure(batch, slots_BT, loss_scale)
                losses_B, totals_B = found.fetch()
            if self.settings.gradients:
                check_gradients(totals_B, losses_B, batch)
        if self.parameters:
            self.parameters.keep(first_sample, loss_scale)
        if self._running is None or self._running.sums is not sums:
            self._running = RunningSums(sums, found.losses_B.device)
        self._running.add(number, batch, found, checked=at_once, loss_scale=loss_scale)

    def drain(self) -> None:
        """Add the batches read since the last call to the host's sums: all, or, if it raises as `scan` does, none."""
        if self._running is not None:
            self._running.drain(self._check)

    def _check(self, batch: TokenBatch, losses_B: Tensor, totals_B: Tensor) -> None:
        check_losses(losses_B, batch, self.model)
        if self.settings.gradients:
            check_gradients(totals_B, losses_B, batch)

    def _is_usable(self, totals_B: Tensor, *, last: bool) -> bool:
        """Whether all gradients are finite; the last try is always used, and the caller checks it."""
        recorded = self.parameters is None or self.parameters.take(last=last)
        return last or (recorded and bool(totals_B.isfinite().all()))

    def _measure(self, batch: TokenBatch, slots_BT: Tensor, loss_scale: float) -> ScannedBatch:
        if self.parameters:
            self.parameters.scanner.name_samples(batch.names, self.parameters.source)
        width = max(mlp.down_proj.in_features for mlp in self.mlps)
        sums = BatchSums(len(self.mlps), width, batch.attention_mask.bool(), slots_BT, self.settings)
        rounded = rounded_products(on=["cpu"])
        if self.settings.gradients:
            with rounded, probe_gradients(self.mlps, sums.add_gradients), torch.enable_grad():
                losses_B = forward_losses(self.model, batch, inplace_backward_logits=True)
                (losses_B.sum() * loss_scale).backward()  # type: ignore[no-untyped-call]
        else:
            with rounded, probe_hidden(self.mlps, sums.add_hidden), torch.no_grad():
                losses_B = forward_losses(self.model, batch)
        without = {layer for layer, mlp in enumerate(self.mlps) if not mlp.down_proj.in_features}
        return sums.join(losses_B.detach(), without)


def draw_reservoir(total_tokens: int, size: int, seed: int) -> Int[Tensor, "M"]:
    """Reservoir slot of each of the stream's M tokens, -1 for tokens not drawn.

    Uniform without replacement, drawn before the scan: the draw depends on neither batch size nor interruptions.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(total_tokens, generator=generator)[:size].sort().values
    slots = torch.full((total_tokens,), -1, dtype=torch.int64)
    slots[drawn] = torch.arange(len(drawn))
    return slots


def slots_of_batch(slots_M: Int[Tensor, "M"], first: int, mask_BT: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Reservoir slots of one batch, -1 on padding; its first unmasked token is number `first` of the stream."""
    slots_BT = torch.full(mask_BT.shape, -1, dtype=torch.int64)
    slots_BT[mask_BT] = slots_M[first : first + int(mask_BT.sum())]
    return slots_BT


def token_to_neuron_major(bits_LRf: Tensor, width: int) -> Tensor:
    """Transpose packed bits from token rows, (L, R, ceil(F/8)), to neuron rows, (L, F, ceil(R/8)), layer by layer."""
    layers = (np.unpackbits(bits_Rf, axis=1, count=width) for bits_Rf in bits_LRf.numpy())
    return torch.stack([torch.from_numpy(np.packbits(bits_RF.T, axis=1)) for bits_RF in layers])


def agree_on_done(store: SumStore, workers: Workers) -> set[int]:
    """Batches already in the sums; the same answer for every worker.

    With local stores, a worker drops all of its sums if a lower-numbered worker also has one of its batches: then they
    are from an earlier run, and this run could not see all parts of that run.
    """
    parts = workers.gather(store.done())
    agreed: set[int] = set()
    for rank, part in enumerate(parts):
        if store.shared or not part & agreed:
            agreed |= part
        elif rank == workers.rank and isinstance(store, LocalStore):
            store.forget()
    return agreed


def scan_shares(
    scanner: Scanner,
    batches: Sequence[TokenBatch],
    slots_M: Tensor,
    store: SumStore,
    workers: Workers,
    *,
    after_batch: Callable[[int], object],
) -> None:
    """Read the batches that are not yet in the store; each worker takes every world-th of them.

    `slots_M` holds the reservoir slots of all tokens; `after_batch` is called with the token count of each batch.
    """
    first_tokens = [0, *accumulate(batch.tokens for batch in batches)]
    first_samples = [0, *accumulate(len(batch.names) for batch in batches)]
    while missing := sorted(set(range(len(batches))) - agree_on_done(store, workers)):
        done: set[int] = set()
        share = missing[workers.rank :: workers.world]
        if store.shared and share:
            # Other jobs with the same store have the same list. Each starts at a random place, so that they overlap
            # late; not seeded, so that they start at different places.
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
    scanner.drain()
    # Parameters first: after a kill between the two, a record without sums is harmless, sums without a record are not.
    if scanner.parameters:
        scanner.parameters.writer.seal()
    store.flush()


def collect_sums(store: SumStore, workers: Workers) -> ScanSums | None:
    """The sums of all workers, in the leading worker; None in the others.

    Numerics: integers, maxima and bits do not depend on the number of workers; float64 sums differ by rounding.
    """
    if store.shared:
        workers.gather(None)  # wait until all workers have flushed
        return store.collect() if workers.leads else None
    part = store.collect()
    if workers.world > 1:
        part = ScanSums({name: value.clone() for name, value in part.tensors.items()}, part.counters, part.done)
    for name in sorted(part.tensors):  # every worker in the same order; a file may have another
        # One worker holds the bits of a token, the others zeros.
        workers.reduce_(part.tensors[name], maximum=name in {"max_abs", "bits_LRf"})
    others = workers.gather((part.counters, part.done))
    if not workers.leads:
        return None
    counters = {name: sum(counts.get(name, 0) for counts, _ in others) for name in part.counters}
    return ScanSums(part.tensors, counters, set().union(*(done for _, done in others)))
