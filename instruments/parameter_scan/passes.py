"""The forward and backward passes of a scan: facts of each call, and the squared norms measured in them."""

import inspect
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instruments.gradients import in_full_precision
from instruments.hooks import in_backward
from instruments.parameter_scan.inputs import HeadPart, InputSquares, narrow
from instruments.parameter_scan.linears import WaitingLinears
from instruments.parameter_scan.targets import Target, refusal, warn_left_out
from instruments.tensors import find_tensors, is_sharded

logger = logging.getLogger(__name__)

IGNORED = -100  # the label that losses ignore


@dataclass(frozen=True, eq=False)
class CallFacts:
    """Facts of a forward call: B samples of T positions."""

    samples: int
    length: int
    mask_BT: Tensor | None  # True at tokens, False at padding; None: all are tokens
    supervised_B: Tensor | None  # number of labels in the loss, if it shifts them by one; None: unknown
    labelled_B: Tensor | None = None  # the same if it does not
    ids_BT: Tensor | None = None  # input_ids
    text: bool = True  # else layers may have other positions than the first argument: patches, frames, nodes

    def split(self, tensor: Tensor) -> Tensor | None:
        """A module's input as (B, T, N), from (B, T, N), (B·T, N) or one row per sample (B, N); None: none of these.

        Not of text: also (B, ..., N), but no (B, B, N), which may be transposed.
        """
        if not self.text and tensor.ndim > 2:
            fits = tensor.shape[0] == self.samples and (tensor.shape[1] != self.samples or self.samples == 1)
            return tensor.flatten(1, -2) if fits else None
        if tensor.ndim == 3 and tensor.shape[0] == self.samples and tensor.shape[1] <= self.length:
            return tensor
        if tensor.ndim == 2 and tensor.shape[0] == self.samples * self.length:
            return tensor.view(self.samples, self.length, -1)
        return tensor.unsqueeze(1) if tensor.ndim == 2 and tensor.shape[0] == self.samples else None


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; a wrapper that takes any arguments has the names of the model inside.

    Raises ConfigError: the model is an encoder-decoder.
    """
    names = _positional_names(model)
    if any(name.startswith("decoder_") for name in names):
        what = "an encoder-decoder has two sequences per sample, and the scanner records one"
        raise refusal(what, "scan a part of the model that has one sequence, such as model.encoder")
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _positional_names(model: nn.Module) -> list[str]:
    """Names of the arguments that forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    inside = list(model.children())
    return names if names or len(inside) != 1 else _positional_names(inside[0])


def read_call(arguments: Mapping[str, Any], given: object = None, samples_in: str | None = None) -> CallFacts:
    """Sizes, padding and number of supervised tokens, from the model's arguments.

    `given`: all arguments; without input_ids or inputs_embeds, samples are dimension 0 of `samples_in`, or of the first
    tensor. Raises ConfigError: there is none, or an attention mask has another shape.
    """
    named = ("input_ids", "inputs_embeds") if samples_in is None else (samples_in,)
    inputs = next((arguments[name] for name in named if isinstance(arguments.get(name), Tensor)), None)
    text = inputs is not None and samples_in is None
    if inputs is None and samples_in is None:
        inputs = next((tensor for tensor in find_tensors(given or dict(arguments)).values() if tensor.ndim), None)
    if inputs is None or not inputs.ndim:
        what = f"the model was called with {', '.join(sorted(arguments)) or 'nothing'}; its samples are unknown"
        raise refusal(what, "call the scanned model with a tensor of samples, or name it: samples='x'")
    samples, sequences = len(inputs), text or inputs.ndim == (3 if inputs.is_floating_point() else 2)
    length, mask = inputs.shape[1] if sequences else 1, arguments.get("attention_mask")
    if not text and getattr(mask, "shape", None) != (samples, length):
        mask = None
    ids_BT = inputs if text and not inputs.is_floating_point() else None
    mask_BT = _padding_mask(mask, samples, length)
    return CallFacts(samples, length, mask_BT, *_supervised(arguments, samples), ids_BT, text)


def _padding_mask(mask: object, samples: int, length: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != samples or mask.shape[1] < length:
        found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        what = f"attention_mask is {found}; the scanner reads padding from a mask of shape {(samples, length)}"
        raise refusal(what, "pass the tokenizer's attention_mask, or none for samples without padding")
    # With a cache the mask also covers earlier positions.
    return mask[:, -length:] != 0


def _supervised(arguments: Mapping[str, Any], samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Labels in the loss, per sample: without each sample's first, which a causal model's loss shifts away; and all."""
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[0] != samples:
        return None, None
    used_BT = labels != IGNORED
    counts_B = used_BT.sum(1, dtype=torch.float32)
    return (used_BT[:, 1:].sum(1, dtype=torch.float32) if shifted is None else counts_B), counts_B


@dataclass
class Squares:
    """Sums of squares by column of the parameter table, each on the device where it was measured."""

    activation: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks); embedding: (B, 1)
    in_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks)
    out_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, output blocks)


@dataclass(eq=False)
class ScanPass:
    """Facts of a forward pass, and the squares measured in the current backward pass.

    The probes in the graph reference it, so several forward passes before one backward pass each keep their own.
    """

    facts: CallFacts
    names: Sequence[str]
    source: str = ""
    recorded: bool = True  # False: its modules are not measured, and a backward pass through it is none of the others'
    ids: dict[int, Tensor] = field(default_factory=dict)  # (B, T) ids of each embedding's look-up
    used: set[str] = field(default_factory=set)  # modules that have run
    squares: Squares = field(default_factory=Squares)
    linears: WaitingLinears = field(default_factory=WaitingLinears)  # not measured yet
    dropped: set[int] = field(default_factory=set)  # parameters whose norms would be wrong
    heads: dict[int, HeadPart] = field(default_factory=dict)  # gradient parts of tied output embeddings
    last_input: InputSquares | None = None  # of the module measured last
    differentiated: bool = False  # its backward pass has a graph of its own, which uses the weights again
    positions_first: bool = False  # whether a layer received (T, B, N); known only where T equals B

    def note_order(self, ids_BT: Tensor) -> None:
        """Compare the ids of a look-up with the model's: a model that works on (T, B) transposes them first."""
        square, whole_BT = self.facts.samples == self.facts.length > 1, self.facts.ids_BT
        if square and whole_BT is not None and ids_BT is not whole_BT and ids_BT.shape == whole_BT.shape:
            ids_BT = ids_BT.to(whole_BT.device)
            if torch.equal(ids_BT, whole_BT.mT) and not torch.equal(ids_BT, whole_BT):
                self.positions_first = True

    def misfit(self, tensor: Tensor, *, is_output: bool) -> str:
        """Why a module's input cannot be measured, or empty; only the output embedding may get the last positions."""
        if not self._has_samples(tensor):
            return "its samples cannot be separated"
        x, facts = self.facts.split(tensor), self.facts
        part = x is not None and tensor.ndim > 2 and x.shape[1] != facts.length and not is_output
        return "it has other positions than the text" if part and facts.mask_BT is not None else ""

    def _has_samples(self, tensor: Tensor) -> bool:
        """Whether the rows of a module's input can be assigned to samples.

        With as many samples as positions, shapes do not tell them apart: from a layer with transposed input on, all
        later layers of the pass are refused.
        """
        facts, x = self.facts, self.facts.split(tensor)
        if x is None or not facts.samples == facts.length > 1:
            return x is not None
        self.positions_first |= tensor.ndim == 3 and 0 < tensor.stride(0) < tensor.stride(1)
        return not self.positions_first and not (tensor.ndim == 2 and len(tensor) == facts.samples)

    def read_input(self, source: Tensor, width: int, device: torch.device) -> InputSquares:
        """Squares of a module's input, which is no `misfit`, in blocks of `width`."""
        x_BTI = self.facts.split(source)
        assert x_BTI is not None
        x_BTI = narrow(x_BTI).to(device)
        pooled = source.ndim == 2 and x_BTI.shape[1] == 1  # one row per sample
        mask_BT = None if pooled else self.facts.mask_BT
        if mask_BT is not None:  # the output embedding may get only the last positions
            # A copy to the host must be complete before it is read there.
            mask_BT = mask_BT[:, -x_BTI.shape[1] :].to(device, non_blocking=device.type != "cpu")
        return InputSquares(source, x_BTI, mask_BT, width)

    def take(self) -> Squares:
        """Return the measured squares and reset them for the next backward pass through the same graph."""
        taken, self.squares, self.linears = self.squares, Squares(), WaitingLinears()
        self.heads, self.last_input = {}, None
        for found in vars(taken).values():
            for column in self.dropped & set(found):
                del found[column]
        return taken


class Passes:
    """The current forward pass, the passes reached by the current backward pass, and finished measurements."""

    product = "auto"  # see `prefer_gram`; tests set another

    def __init__(self, *, gradients: bool, left_out: dict[str, str]) -> None:
        """Weights that turn out not to be measurable go to `left_out`, with a reason."""
        self.gradients, self.left_out = gradients, left_out
        self.finished: deque[tuple[ScanPass, Squares]] = deque()
        self.closed = False  # graphs may outlive the scanner
        self.ran = False  # a watched module has run
        self._running: ScanPass | None = None
        self._reached: list[ScanPass] = []
        self._told = False

    def recomputed(self) -> bool:
        """Whether the forward pass that begins is recomputed by a backward pass (checkpointing of the whole model)."""
        if self._reached and not in_backward():
            self._reached = []  # left by a failed backward pass
        return bool(self._reached)

    def begin(self, scan_pass: ScanPass | None) -> None:
        """Begin a forward pass; None if it is not recorded."""
        self._running = scan_pass

    def enter(self, target: Target, name: str, x: Tensor, misfit: Callable[[ScanPass], str]) -> ScanPass | None:
        """The pass in which a module gets the input `x`; None if nothing is to be watched.

        A weight that is left out is watched as well: a checkpoint must save the same tensors whenever it runs.
        """
        self.ran = True
        scan_pass = self._running or (self._reached[-1] if self._reached else None)
        if scan_pass is None or not scan_pass.recorded:
            return None
        if is_sharded(x):  # not its weight, which fully_shard has split again before this hook
            self.leave_out(target, "its weight is split over processes")
            return None
        if scan_pass is self._running:
            twice = "it ran twice in one forward pass" if name in scan_pass.used else ""
            if why := twice or misfit(scan_pass):
                self.leave_out(target, why)
            scan_pass.used.add(name)
        return scan_pass if self.gradients or target.column not in scan_pass.dropped else None

    def leave_out(self, target: Target, why: str) -> None:
        """Discard a target's norms in the current passes, including those still to be measured; warn once."""
        for scan_pass in filter(None, (self._running, *self._reached)):
            scan_pass.dropped.update(target.columns)
        if target.label not in self.left_out:
            self.left_out[target.label] = why
            warn_left_out({target.label: why})

    def end(self, output: object) -> None:
        """End the forward pass (`output` None: it failed); with gradients, norms follow in the backward pass."""
        scan_pass, self._running = self._running, None
        if scan_pass is None or (output is None and sys.exc_info()[0] is not None):
            return
        if not self.gradients:
            self._collect([scan_pass])
            return
        for tensor in [tensor for tensor in find_tensors(output).values() if tensor.requires_grad]:
            tensor.register_hook(partial(self.reach, scan_pass))

    def close(self) -> None:
        """Record nothing more; finished measurements stay."""
        self.closed, self._running, self._reached = True, None, []

    def reach(self, scan_pass: ScanPass, _grad: Tensor | None = None) -> None:
        """The backward pass has reached this pass: its outputs, or, if they were not found in it, a layer."""
        if self.closed or scan_pass in self._reached:
            return
        if scan_pass.differentiated:
            if not self._told:
                self._told = True
                logger.warning("parameter scan: gradients of gradients (create_graph=True) are not recorded")
            return
        scan_pass.differentiated = torch.is_grad_enabled()
        if not self._reached:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reached.append(scan_pass)

    def is_reached(self, scan_pass: ScanPass) -> bool:
        """Whether the current backward pass is recorded for this pass."""
        self.reach(scan_pass)
        return scan_pass in self._reached

    def _finish(self) -> None:
        """Collect the measurements at the end of the whole backward pass."""
        self._collect(self._reached)
        self._reached = []

    def measure_linears(self, scan_pass: ScanPass) -> None:
        """Measure the Linear layers that wait in a pass."""
        if (device := scan_pass.linears.device) is None:
            return
        squares = scan_pass.squares
        with in_full_precision(device):
            for target, found in scan_pass.linears.measure(self.product):
                if found is None:
                    self.leave_out(target, "its input or its output's gradient is changed in place")
                else:
                    column = target.column
                    squares.activation[column], squares.in_gradient[column], squares.out_gradient[column] = found

    def _collect(self, passes: Sequence[ScanPass]) -> None:
        for scan_pass in passes:
            self.measure_linears(scan_pass)
        self.finished.extend((scan_pass, scan_pass.take()) for scan_pass in passes if scan_pass.recorded)
