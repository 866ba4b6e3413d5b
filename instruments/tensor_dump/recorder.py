"""What the hooks speak to: which step and microbatch it is, and what is to become of a tensor."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from instruments.precision.calls import in_backward
from instruments.tensor_dump import capture
from instruments.tensor_dump.capture import Capture, Held, HostRing, Part, RankInfo, Slot, Watched
from instruments.tensor_dump.config import BACKWARD, FORWARD, DumpConfig
from instruments.tensor_dump.index import DROPPED, STATISTICS, STORED, Placement, Source, TensorRecord, make_name, now
from instruments.tensor_dump.statistics import exact_moments, measure
from instruments.tensor_dump.writer import DumpWriter

# A place in the order of calls: the microbatch, and the number among the module's calls in it.
Turn = tuple[int, int]


class CallOrder:
    """The calls of one step, in the order of the forward passes."""

    def __init__(self) -> None:
        """None so far."""
        self._order: list[tuple[Turn, TensorWeakRef]] = []
        self._numbers: Counter[tuple[Watched, int]] = Counter()
        self._open: defaultdict[Watched, list[int]] = defaultdict(list)  # positions that were not run again yet
        self._latest = -2  # position that was run again last

    def __bool__(self) -> bool:
        """Whether anything was called."""
        return bool(self._order)

    def begin(self, watched: Watched, microbatch: int, first_input: Tensor) -> Turn:
        """A call in a forward pass."""
        turn = microbatch, self._numbers[watched, microbatch]
        self._numbers[watched, microbatch] += 1
        self._open[watched].append(len(self._order))
        self._order.append((turn, TensorWeakRef(first_input)))
        return turn

    def repeat(self, watched: Watched, first_input: Tensor) -> Turn | None:
        """The first call that this one repeats; None where none is left.

        A piece that is run again begins with the very tensor of the first time, and goes on in its old order: after
        the call repeated last comes the next. Where neither helps, older calls come first.
        """
        left = self._open[watched]
        if not left:
            return None
        likely = [one for one in left if _is_same(self._order[one][1](), first_input)] or left
        position = self._latest + 1 if self._latest + 1 in likely else likely[0]
        left.remove(position)
        self._latest = position
        return self._order[position][0]


def _is_same(kept: Tensor | None, tensor: Tensor) -> bool:
    """Whether both are the same memory; as long as the first lives, nothing else can be there."""
    return kept is not None and kept.data_ptr() == tensor.data_ptr() and kept.shape == tensor.shape


@dataclass(frozen=True)
class Call:
    """One call of a watched module."""

    watched: Watched
    step: int
    turn: Turn
    recompute: bool


class Recorder:
    """Turns what hooks see into captures. Hooks may run in several threads of the autograd engine."""

    def __init__(
        self, config: DumpConfig, writer: DumpWriter, ring: HostRing, rank_info: RankInfo, metadata: Mapping[str, Any]
    ) -> None:
        """`writer` gets the captures; `ring` is where their bytes wait; every record has the `metadata`."""
        self._config, self._writer, self._ring = config, writer, ring
        self._rank_info, self._metadata = rank_info, metadata
        self._lock = Lock()
        self._captured = 0
        self.dumped_steps = 0  # that were on the schedule
        self._open = True
        self._kept: deque[list[Capture]] = deque([[]])  # of the last steps; only with last_steps
        self._begin_step(0)

    def begin_microbatch(self, chunk: int) -> None:
        """The model's forward pass begins."""
        if not in_backward():
            self._microbatches[chunk] += 1

    def begin_call(self, watched: Watched, first_input: Tensor) -> Call | None:
        """A watched module is called; None where nothing of it is wanted."""
        if not (self._active and self._open):
            return None
        microbatch = max(self._microbatches[watched.chunk] - 1, 0)
        if in_backward():
            turn = self._calls.repeat(watched, first_input) or (microbatch, 0)
            return Call(watched, self._step, turn, recompute=True)
        return Call(watched, self._step, self._calls.begin(watched, microbatch, first_input), recompute=False)

    def take(self, call: Call, tensor_name: str, tensor: Tensor, part: Part, direction: str = FORWARD) -> None:
        """Keep a tensor as it is now."""
        if tensor_name not in self._config.tensors or not self._open or tensor.is_meta:
            return
        if call.recompute and direction == FORWARD and not self._config.recomputed:
            return
        watched = call.watched
        source = Source(
            call.step, *call.turn, direction, call.recompute,
            watched.name, watched.layer, watched.layer_type, tensor_name,
        )  # fmt: skip
        with self._lock, torch.no_grad():
            kept, placement = capture.keep_tokens(tensor.detach(), part, self._config)
            held = self._recall(tensor, placement) or self._hold(kept)
            if held.status != DROPPED and (version := _version(tensor)) is not None:
                self._seen[id(tensor)] = TensorWeakRef(tensor), version, placement, held
            captured = self._describe(source, tensor, kept, placement, held.status), held
            if self._config.last_steps is None:
                self._writer.put(captured)
            else:
                self._kept[-1].append(captured)

    def take_gradient(self, call: Call, tensor_name: str, tensor: Tensor, part: Part) -> None:
        """Keep the gradient of a tensor, once it is known; a tensor that asks for none has none."""
        if tensor_name in self._config.tensors and tensor.requires_grad:
            tensor.register_hook(partial(self._on_gradient, call, tensor_name, part))

    def end_step(self, *, finite: bool) -> None:
        """The next step begins; with last_steps, what was kept is written where the loss was not finite."""
        if self._config.last_steps is not None:
            if not finite:
                self._write_kept()
            self._kept.append([])
            while len(self._kept) > self._config.last_steps:
                self._forget_oldest()
        self.dumped_steps += self._active
        self._begin_step(self._step + 1)

    def close(self) -> None:
        """Take nothing more; what waits for a loss that is not finite is forgotten."""
        self.dumped_steps += self._active and bool(self._calls)
        self._open = False
        while self._kept:
            self._forget_oldest()

    def _begin_step(self, number: int) -> None:
        config = self._config
        turn, rest = divmod(number - config.first_step, config.every_steps)
        self._step = number
        self._microbatches: Counter[int] = Counter()  # chunk → forward passes so far
        self._active = turn >= 0 and rest == 0 and (config.max_steps is None or turn < config.max_steps)
        self._calls = CallOrder()
        # By id, tensors captured in this step: themselves while they live, their version and what was kept of them.
        self._seen: dict[int, tuple[TensorWeakRef, int, Placement, Held]] = {}

    def _on_gradient(self, call: Call, tensor_name: str, part: Part, gradient: Tensor) -> None:
        self.take(call, tensor_name, gradient, part, BACKWARD)

    def _recall(self, tensor: Tensor, placement: Placement) -> Held | None:
        """What was kept of the same tensor, if it has not changed since."""
        if id(tensor) not in self._seen:
            return None
        seen, version, place, held = self._seen[id(tensor)]
        return held if seen() is tensor and version == _version(tensor) and place == placement else None

    def _describe(
        self, source: Source, tensor: Tensor, kept: Tensor, placement: Placement, status: str
    ) -> TensorRecord:
        """The record, without what the writer finds out of the content."""
        info, timestamp, quant_type = self._rank_info, now(), capture.quant_type_of(tensor)
        counter = self._captured * info.world + info.rank
        self._captured += 1
        return TensorRecord(
            name=make_name(timestamp, counter, source, quant_type), counter=counter, timestamp=timestamp,
            rank=info.rank, source=source, parallel=info.parallel, placement=placement, shape=tuple(kept.shape),
            dtype=capture.dtype_name(tensor.dtype), device=str(tensor.device), requires_grad=tensor.requires_grad,
            quant_type=quant_type, label=self._config.quant_type, autocast=capture.autocast_type_of(tensor),
            status=status, metadata=self._metadata,
        )  # fmt: skip

    def _hold(self, kept: Tensor) -> Held:
        """Copy or measure, as the settings and the room ask for."""
        if self._config.keep == "statistics":
            return self._measure(kept)
        if (slot := self._find_room(kept.nbytes)) is not None:
            return Held.copy(STORED, kept, slot)
        return Held(DROPPED) if self._config.when_full == "drop" else self._measure(kept)

    def _measure(self, kept: Tensor) -> Held:
        if kept.device.type == "cpu":
            return Held(STATISTICS, found={"statistics": measure(kept)})
        moments = exact_moments(kept)
        slot = self._find_room(moments.nbytes)
        return Held(DROPPED) if slot is None else Held.copy(STATISTICS, moments, slot)

    def _find_room(self, size: int) -> Slot | None:
        """Memory for so many bytes, or None where the settings say not to wait for it."""
        if size > self._ring.capacity:
            return None
        slot = self._ring.reserve(size)
        while slot is None and self._config.last_steps is not None and len(self._kept) > 1:
            self._forget_oldest()
            slot = self._ring.reserve(size)
        if slot is None and self._config.last_steps is None and self._config.when_full == "block":
            self._writer.flush()  # or the writer might wait for more, before it frees anything
            return self._ring.reserve(size, wait=True)
        return slot

    def _write_kept(self) -> None:
        for captures in self._kept:
            for captured in captures:
                self._writer.put(captured)
            captures.clear()

    def _forget_oldest(self) -> None:
        for _record, held in self._kept.popleft():
            if held.slot is not None:
                if held.wait is not None:
                    held.wait()
                self._ring.release(held.slot)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def watch_microbatches(root: nn.Module, chunk: int, recorder: Recorder) -> RemovableHandle:
    """Count the forward passes of a model, or of a chunk of one."""
    return root.register_forward_pre_hook(lambda _module, _args: recorder.begin_microbatch(chunk))
