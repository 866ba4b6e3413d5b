"""Measure the norms of a running model's weight inputs and gradients, per sample and block.

The model's results do not change: logits, losses, gradients and `generate()` are bitwise the same. Weights may be
frozen, trained or quantised, with checkpointing, autocast or gradient accumulation. Gradients are those of the loss on
which `backward` is called: a divided or scaled loss gives divided or scaled norms. With checkpointing, a backward pass
must run in the `with` block of its forward pass: torch raises CheckpointError if hooks come or go in between.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError, NumericsError, some
from instruments.hooks import EagerHook, in_transform, refuse_replica
from instruments.parameter_scan.file_format import ScannedSequence, WatchedParameter
from instruments.parameter_scan.module_hooks import TargetHooks, WeightUses
from instruments.parameter_scan.passes import CallFacts, Passes, ScanPass, Squares, bind_arguments, read_call
from instruments.parameter_scan.targets import ScanRecord, Selection, Target, refusal, warn_left_out
from instruments.shapes import Float
from instruments.tensors import to_host

logger = logging.getLogger(__name__)

_SCANNED: WeakSet[nn.Module] = WeakSet()


class ParameterTensorScanner:
    """Exact per-sample norms of every watched weight's input and gradient.

    Args:
        model: any; of text if its forward takes input_ids or inputs_embeds, and attention_mask if there is padding.
        patterns: globs on module names; None for every Linear, Conv1D, embedding and fused expert. `left_out` gives the
            weights without norms and the reasons, also those found during a pass, such as a second use.
        block_width: rows and columns of a block; where features are attention heads, a block is a head.
        gradients: True records backward passes, and no forward pass under no_grad. False records forward passes alone,
            under no_grad or not; gradients are then NaN.
        samples: name of the argument whose dimension 0 are the samples; None: input_ids, inputs_embeds, or else the
            first tensor. Layers that mix or reorder samples are left out only where shapes show it.
        every_steps: measure the first and then every n-th pass that could be recorded; the others cost next to nothing.
    Raises:
        ConfigError: no parameter that can be scanned matches, every_steps below 1, or (on entering) the model is
            already being scanned.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] | None = None,
        block_width: int = 64,
        gradients: bool = True,
        samples: str | None = None,
        every_steps: int = 1,
    ) -> None:
        """Find the weights to watch; the model is changed only on entering."""
        if every_steps < 1:
            raise refusal(f"every_steps={every_steps} is below 1", "every_steps=8")
        self._model: nn.Module | None = model
        selection = Selection(model, patterns, block_width)
        self._targets: Sequence[Target] = selection.targets
        self.left_out = selection.left_out
        self.parameters: list[WatchedParameter] = [one for target in self._targets for one in target.parameters]
        self.skipped: list[str] = []  # samples without a supervised token
        self._gradients = gradients
        self._passes = Passes(gradients=gradients, left_out=self.left_out)
        self._uses = WeightUses(self._targets if gradients else ())
        self._hooks = ExitStack()
        self._records: list[ScanRecord] = []
        self._measured: set[int] = set()  # parameters with norms in any pass
        self._names: Sequence[str] | None = None
        self._samples = samples
        self._source = ""
        self._step, self._every = 0, every_steps

    def __enter__(self) -> "ParameterTensorScanner":
        if self._model is None:
            raise refusal("this scanner has ended", "make a new one: ParameterTensorScanner(model)")
        modules = {self._model, *(target.module for target in self._targets)}
        if modules & set(_SCANNED):
            do = "leave the first `with` block before the next, or watch all in one: patterns=[...]"
            raise refusal("the model is being scanned already", do)
        _SCANNED.update(modules)
        hooks = (hook for target in self._targets for hook in TargetHooks(target, self._passes).install())
        self._hooks.enter_context(self._model.register_forward_pre_hook(EagerHook(self._begin), with_kwargs=True))
        for hook in chain(hooks, self._uses.install()):
            self._hooks.enter_context(hook)
        self._hooks.enter_context(self._model.register_forward_hook(EagerHook(self._end), always_call=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Remove all hooks; finished records stay until they are collected."""
        self._hooks.close()
        _SCANNED.difference_update({self._model, *(target.module for target in self._targets)})
        self._uses.end()
        self._passes.close()
        try:
            if kind is None:
                self._records = self.collect()
                self._note_unmeasured()
        finally:
            self._model, self._targets, self._uses = None, (), WeightUses(())

    def _note_unmeasured(self) -> None:
        """At the end: add the weights that have no norms in any pass to `left_out`."""
        why = "its module did not run, or no gradient reached it" if self._gradients else "its module did not run"
        silent = [target for target in self._targets if self._measured.isdisjoint(target.columns)]
        found = {one.name: why for own in silent if own.label not in self.left_out for one in own.parameters}
        if self._passes.ran and not self._measured:
            also = ", and backward in the `with` block" if self._gradients else ""
            logger.warning("parameter scan: nothing was recorded: call the scanned model, not a part of it%s", also)
        if self._measured:
            self.left_out |= found
            warn_left_out(found)

    def name_samples(self, names: Sequence[str], source: str = "") -> None:
        """Name the samples of the next recorded forward pass, and their source."""
        self._names, self._source = list(names), source

    def collect(self) -> list[ScanRecord]:
        """Records of all passes finished since the last call: backward passes, or forward passes with gradients=False.

        Raises NumericsError: a sample's gradients are missing, all zero or not finite; its pass is dropped, and the
            next call returns the others.
        """
        while self._passes.finished:
            scan_pass, squares = self._passes.finished.popleft()
            self._measured |= set(squares.out_gradient if self._gradients else squares.activation)
            record, skipped = to_record(scan_pass, squares, self.parameters, gradients=self._gradients)
            if skipped and not self.skipped:
                logger.warning("parameter scan: samples without a supervised token are skipped: %s", some(skipped))
            self.skipped += skipped
            if record is not None:
                self._records.append(record)
        records, self._records = self._records, []
        return records

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the model's forward."""
        refuse_replica(model, "ParameterTensorScanner")
        if self._passes.recomputed():
            return  # recomputation: its modules use the pass of the backward pass
        self._passes.begin(None)
        if (self._gradients and not torch.is_grad_enabled()) or in_transform():
            return
        arguments = bind_arguments(model, args, kwargs)
        facts = read_call(arguments, (args, kwargs), self._samples)
        if not facts.samples * facts.length:
            return  # an empty batch
        self._step += 1
        if (self._step - 1) % self._every:
            self._passes.begin(ScanPass(facts, (), recorded=False))
            return
        names = self._names or [f"step {self._step}, sample {sample + 1}" for sample in range(facts.samples)]
        if len(names) != facts.samples:
            raise ConfigError(
                f"{len(names)} names for {facts.samples} samples", where="scanner.name_samples", do="name every sample"
            )
        self._passes.begin(ScanPass(facts, names, self._source))
        self._names, self._source = None, ""
        self._uses.begin()

    def _end(self, _model: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """Hook after the model's forward, also after a failed one (output None)."""
        for target, function in self._uses.end().items():
            self._passes.leave_out(target, f"{function} uses it outside its module")
        self._passes.end(output)


def join_blocks(
    pieces: Mapping[int, Tensor], counts: Sequence[int], samples: int
) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B P"]]:
    """Concatenate the blocks of P parameters, `counts` each, NaN if not measured; and their sum by parameter."""
    missing_Bn = torch.full((samples, max(counts, default=0)), torch.nan)
    blocks = (pieces[column] if column in pieces else missing_Bn[:, :count] for column, count in enumerate(counts))
    joined_Bn = torch.cat([*blocks], dim=1)
    owner_n = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return joined_Bn, joined_Bn.new_zeros(samples, len(counts)).index_add_(1, owner_n, joined_Bn)


def to_record(
    scan_pass: ScanPass, squares: Squares, parameters: Sequence[WatchedParameter], *, gradients: bool
) -> tuple[ScanRecord | None, list[str]]:
    """The record of a pass, and the names of samples left out because they have no supervised token.

    A sample whose only label is its first has none if the model shifts labels: its gradient is zero or not finite.
    All transfers happen here. Raises NumericsError: `gradients`, and a sample's are missing, all zero or not finite.
    """
    squares, mask_BT, counts_B = _fetch(scan_pass.facts, squares)
    kept = torch.ones(len(mask_BT), dtype=torch.bool)
    norms = _by_parameter_and_block(parameters, squares, len(kept))
    measured = sorted(squares.out_gradient)
    found_BP = norms[1][:, measured]
    if gradients and counts_B:
        trained = found_BP.isfinite().all(1) & found_BP.any(1)
        supervised_B = counts_B["supervised_B"]
        kept = (supervised_B > 0) | ((counts_B.get("labelled_B", supervised_B) > 0) & trained)
    indices = kept.nonzero().flatten().tolist()
    skipped = [name for name, keep in zip(scan_pass.names, kept.tolist(), strict=True) if not keep]
    if not indices:
        return None, skipped
    counts = mask_BT.sum(1).tolist()
    sequences = [ScannedSequence(scan_pass.names[index], counts[index], scan_pass.source) for index in indices]
    if gradients:
        weights = [parameters[column].name for column in measured]
        _check(found_BP[kept], weights, [sequence.name for sequence in sequences])
    return ScanRecord(sequences, *(values_BN[kept] for values_BN in norms)), skipped


def _by_parameter_and_block(
    parameters: Sequence[WatchedParameter], squares: Squares, samples: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five tensors of a record: activation and gradient in total, both by input block, gradient by output block."""
    inputs, outputs = ([getattr(one, side) for one in parameters] for side in ("in_blocks", "out_blocks"))
    # An embedding has no input block, but one activation: that of the rows looked up.
    _, activation = join_blocks(squares.activation, [max(1, count) for count in inputs], samples)
    linear = {column: found for column, found in squares.activation.items() if inputs[column]}
    in_activation, _ = join_blocks(linear, inputs, samples)
    in_gradient, _ = join_blocks(squares.in_gradient, inputs, samples)
    out_gradient, gradient = join_blocks(squares.out_gradient, outputs, samples)
    return activation.sqrt(), gradient.sqrt(), in_activation.sqrt(), in_gradient.sqrt(), out_gradient.sqrt()


def _fetch(facts: CallFacts, squares: Squares) -> tuple[Squares, Tensor, dict[str, Tensor]]:
    """Squares, mask (B, T) and numbers of labels (B,), if known, on the CPU: one transfer."""
    groups = vars(squares).values()
    pieces = [[*group.values()] for group in groups]
    # All that was measured is joined on the first of the devices.
    device = next((piece.device for group in pieces for piece in group), torch.device("cpu"))
    joined = [torch.cat([piece.to(device) for piece in group], dim=1) for group in pieces if group]
    counted = {name: getattr(facts, name) for name in ("mask_BT", "supervised_B", "labelled_B")}
    known = {name: fact.to(device, torch.float32) for name, fact in counted.items() if fact is not None}
    fetched = iter(to_host([*joined, *known.values()]))
    parts = [next(fetched).split([piece.shape[1] for piece in group], dim=1) if group else () for group in pieces]
    squares = Squares(*(dict(zip(group, part, strict=True)) for group, part in zip(groups, parts, strict=True)))
    call = dict(zip(known, fetched, strict=True))
    mask_BT = call.pop("mask_BT") > 0 if "mask_BT" in call else torch.ones(facts.samples, facts.length).bool()
    return squares, mask_BT, call


def _check(found_BP: Tensor, measured: Sequence[str], names: Sequence[str]) -> None:
    """Raise NumericsError if a sample's gradients are missing, all zero or not finite; `measured`: names of weights."""
    # List the last weight first: the backward pass starts there and propagates non-finite values.
    finite_BP = found_BP.isfinite()
    weights = [name for name, fine in zip(measured, finite_BP.all(0).tolist(), strict=True) if not fine][::-1]
    trained_B = finite_BP.all(1) & found_BP.any(1)
    if bad := [name for name, trained in zip(names, trained_B.tolist(), strict=True) if not trained]:
        raise NumericsError(
            f"the gradient of {len(bad)} of {len(names)} samples is missing, zero or not finite",
            where=some(bad) + (f"; of {some(weights, 3, ', ')}" if weights else ""),
            do="call backward on a loss of the model's output that uses these samples (labels not all masked; a "
            "sample's first label is shifted away), with inputs_embeds.requires_grad_() if weights are frozen; or "
            "scan in float32",
        )
