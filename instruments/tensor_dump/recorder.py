"""Receives tensors from the hooks, tracks step, microbatch and call, and decides what is captured."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from instruments.dtypes import SAFETENSORS, dtype_name, torch_dtype
from instruments.hooks import in_backward, in_transform
from instruments.tensor_dump.config import BACKWARD, FORWARD, TENSORS, DumpConfig
from instruments.tensor_dump.index import STATISTICS, STORED, Source, TensorRecord, make_name, now
from instruments.tensor_dump.writer import Capture, DumpWriter, Held, copy_to_host, exact_moments, measure
from instruments.tensors import is_sharded, version_of


@dataclass(frozen=True, eq=False)
class Watched:
    """A module that is watched."""

    name: str
    module: nn.Module
    layer_type: str  # a key of TENSORS
    layer: int | None  # of the decoder, from 0
    # Installs the hooks; leaving the returned contexts removes them.
    hook: "Callable[[Watched, Recorder], Sequence[AbstractContextManager[object]]]"
    token_axes: Mapping[str, int]  # tensor → its axis that counts the tokens of a sequence
    parameter: str = ""  # name within the module, where that holds several layers

    def expected(self, config: DumpConfig) -> list[str]:
        """The configured tensors that this kind of module has."""
        return [tensor for tensor in TENSORS[self.layer_type] if tensor in config.tensors]


# fp32, bf16, fp8e4m3 ...
_NAMES = {
    torch_dtype(name): re.sub("^f", "fp", name.lower().replace("_", ""))
    for name in SAFETENSORS
    if torch_dtype(name).is_floating_point
}


def quant_type_of(tensor: Tensor) -> str:
    """Number format: fp32, bf16 ...; for weights packed by bitsandbytes nf4, fp4 or int8."""
    state = getattr(tensor, "quant_state", None)  # of a Params4bit
    return str(state.quant_type) if state is not None else _NAMES.get(tensor.dtype, dtype_name(tensor.dtype))


def autocast_type_of(tensor: Tensor) -> str | None:
    """The format of its matrix products under autocast; None without autocast."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return _NAMES[torch.get_autocast_dtype(kind)]


@dataclass(frozen=True)
class Call:
    """One call of a watched module; fields as in `Source`."""

    watched: Watched
    step: int
    microbatch: int
    number: int
    evaluation: bool
    recompute: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)  # metadata of its tensors


class CallOrder:
    """The calls of one step, in the order of the forward passes."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._order: list[tuple[Call, TensorWeakRef]] = []
        self._numbers: Counter[tuple[Watched, int, bool]] = Counter()
        self._open: defaultdict[Watched, list[int]] = defaultdict(list)  # positions not recomputed yet
        self._latest = -2  # position recomputed last

    def __bool__(self) -> bool:
        return bool(self._order)

    def begin(self, watched: Watched, microbatch: int, first_input: Tensor, *, evaluation: bool) -> Call:
        """Register a call in a forward pass."""
        call = Call(watched, self._step, microbatch, self._numbers[watched, microbatch, evaluation], evaluation)
        self._numbers[watched, microbatch, evaluation] += 1
        self._open[watched].append(len(self._order))
        self._order.append((call, TensorWeakRef(first_input)))
        return call

    def repeat(self, watched: Watched, first_input: Tensor) -> Call | None:
        """The recomputation of an earlier call; None if none is left.

        A recomputed segment starts with the identical input tensor and then follows the original order, so the position
        after the last recomputed one is preferred. If neither identifies the call, the oldest is taken, training before
        evaluation.
        """
        left = self._open[watched]
        if not left:
            return None
        trained = [one for one in left if not self._order[one][0].evaluation]
        likely = [one for one in left if _is_same(self._order[one][1](), first_input)] or trained or left
        position = self._latest + 1 if self._latest + 1 in likely else likely[0]
        left.remove(position)
        self._latest = position
        return replace(self._order[position][0], recompute=True)


def _is_same(kept: Tensor | None, tensor: Tensor) -> bool:
    """Whether both use the same memory; while `kept` is alive, no other tensor can."""
    return kept is not None and kept.data_ptr() == tensor.data_ptr() and kept.shape == tensor.shape


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and its coordinates in the parallel groups."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and group size


def rank_and_world() -> tuple[int, int]:
    """Rank of this process in torch.distributed, and the number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class Recorder:
    """Turns tensors from hooks into captures. Hooks may run in several threads of the autograd engine."""

    def __init__(
        self, config: DumpConfig, writer: DumpWriter, rank_info: RankInfo, metadata: Mapping[str, Any]
    ) -> None:
        """`writer` receives the captures; all records carry `metadata`."""
        self._config, self._writer, self._memory = config, writer, writer.memory
        self._rank_info, self._metadata = rank_info, metadata
        self._lock = Lock()
        self._captured = 0
        self.dumped_steps = 0  # completed steps selected by the settings
        self._open = True
        self._kept: deque[list[Capture]] = deque([[]])  # captures of the last steps; only with last_steps
        self._evaluating: bool | None = None  # whether the model's running forward pass is without gradients
        self._begin_step(0)

    def begin_microbatch(self) -> None:
        """The model's forward pass begins."""
        if not in_backward():
            self._evaluating = not torch.is_grad_enabled()
            self._microbatches[self._evaluating] += 1

    def end_microbatch(self) -> None:
        """The model's forward pass has ended."""
        if not in_backward():
            self._evaluating = None

    @property
    def microbatches(self) -> int:
        """Forward passes with gradients in this step."""
        return self._microbatches[False]

    def begin_call(self, watched: Watched, first_input: Tensor, **facts: Any) -> Call | None:  # noqa: ANN401 - JSON values
        """A watched module is called; None if this call is not dumped. `facts` become metadata of its tensors."""
        if not (self._active and self._open) or in_transform():
            return None
        # Outside a forward pass of the whole model, such as in model.encode(x), the call itself decides.
        evaluation = not torch.is_grad_enabled() if self._evaluating is None else self._evaluating
        microbatch = max(self._microbatches[evaluation] - 1, 0)
        if in_backward():
            unknown = Call(watched, self._step, microbatch, 0, evaluation, recompute=True)
            call = self._calls.repeat(watched, first_input) or unknown
        else:
            call = self._calls.begin(watched, microbatch, first_input, evaluation=evaluation)
        return replace(call, facts=facts)

    def leave_out(self, watched: Watched, tensors: Sequence[str], why: str) -> None:
        """Report tensors of a module, as far as they are requested, that cannot be dumped; `why` says what they are."""
        if wanted := [tensor for tensor in tensors if tensor in watched.expected(self._config)]:
            noted = self._writer.manifest.not_dumped.setdefault(watched.name, {})
            noted.update(dict.fromkeys(wanted, why))

    def take(self, call: Call, tensor_name: str, tensor: Tensor, direction: str = FORWARD) -> None:
        """Capture this process's part of a tensor in its current state."""
        if tensor_name not in self._config.tensors or not self._open or tensor.is_meta:
            return
        if call.recompute and direction == FORWARD:  # captured in the first pass already
            return
        watched = call.watched
        if tensor.is_complex():
            self.leave_out(watched, [tensor_name], "complex numbers")
            return
        source = Source(
            call.step, call.microbatch, call.number, call.evaluation, direction, watched.name, watched.layer,
            watched.layer_type, tensor_name,
        )  # fmt: skip
        local = tensor.to_local() if is_sharded(tensor) else tensor
        with self._lock, torch.no_grad():
            kept = self._keep_tokens(local.detach(), watched.token_axes.get(tensor_name.removeprefix("grad_")))
            held = self._recall(local, kept.shape) or self._hold(kept)
            if (version := version_of(local)) is not None:
                self._seen[id(local)] = TensorWeakRef(local), version, kept.shape, held
            captured = self._describe(source, tensor, kept, held.status, call.facts), held
            if self._config.last_steps is None:
                self._writer.put(captured)
            else:
                self._kept[-1].append(captured)

    def take_gradient(self, call: Call, tensor_name: str, tensor: Tensor) -> None:
        """Capture a tensor's gradient when the backward pass computes it; nothing if it requires none."""
        if tensor.requires_grad and tensor_name in self._config.tensors:
            tensor.register_hook(lambda gradient: self.take(call, tensor_name, gradient, BACKWARD))

    def end_step(self, *, finite: bool) -> None:
        """Begin the next step; with last_steps, write the kept captures if the loss was not finite."""
        if self._config.last_steps is not None:
            if not finite:
                self.write_kept()
            self._kept.append([])
            while len(self._kept) > self._config.last_steps:
                self._forget_oldest()
        self.dumped_steps += self._active
        self._begin_step(self._step + 1)

    def write_kept(self) -> None:
        """Write the captures kept by last_steps."""
        for captures in self._kept:
            for captured in captures:
                self._writer.put(captured)
            captures.clear()

    def close(self) -> None:
        """Stop capturing; captures kept by last_steps are dropped."""
        self.dumped_steps += self._active and bool(self._calls)
        self._open = False
        while self._kept:
            self._forget_oldest()

    def _begin_step(self, number: int) -> None:
        config = self._config
        turn, rest = divmod(number - config.first_step, config.every_steps)
        self._step = number
        self._microbatches: Counter[bool] = Counter()  # evaluation → forward passes so far
        self._active = turn >= 0 and rest == 0 and (config.max_steps is None or turn < config.max_steps)
        self._calls = CallOrder(number)
        # id → tensor captured in this step (weak reference), its version, the shape that was kept, and the content.
        self._seen: dict[int, tuple[TensorWeakRef, int, torch.Size, Held]] = {}

    def _keep_tokens(self, tensor: Tensor, axis: int | None) -> Tensor:
        """The first positions, at most `max_tokens`."""
        most = self._config.max_tokens
        if most is None or axis is None or not -tensor.ndim <= axis < tensor.ndim:
            return tensor
        return tensor.narrow(axis, 0, min(most, tensor.shape[axis]))

    def _recall(self, tensor: Tensor, shape: torch.Size) -> Held | None:
        """The content captured of the same tensor, if it has not changed since."""
        if id(tensor) not in self._seen:
            return None
        seen, version, kept, held = self._seen[id(tensor)]
        return held if seen() is tensor and version == version_of(tensor) and kept == shape else None

    def _describe(
        self, source: Source, tensor: Tensor, kept: Tensor, status: str, facts: Mapping[str, Any]
    ) -> TensorRecord:
        """The record, without the fields that the writer computes from the content."""
        info, timestamp, quant_type = self._rank_info, now(), quant_type_of(tensor)
        counter = self._captured * info.world + info.rank
        self._captured += 1
        name = make_name(
            timestamp, counter, source.layer_type, source.layer, source.direction, quant_type, source.tensor
        )
        return TensorRecord(
            name=name, counter=counter, timestamp=timestamp, rank=info.rank, source=source, parallel=info.parallel,
            shape=tuple(kept.shape), dtype=dtype_name(tensor.dtype), device=str(tensor.device),
            requires_grad=tensor.requires_grad, is_leaf=tensor.is_leaf, quant_type=quant_type,
            label=self._config.quant_type, autocast=autocast_type_of(tensor), status=status,
            metadata={**facts, **self._metadata},
        )  # fmt: skip

    def _hold(self, kept: Tensor) -> Held:
        """Copy the tensor; or compute its statistics, if only they are wanted or it exceeds the memory."""
        if self._config.keep == "tensors" and self._find_room(kept.nbytes):
            data, wait = copy_to_host(kept)
            return Held(STORED, data, kept.nbytes, wait)
        if kept.device.type == "cpu":
            return Held(STATISTICS, found={"statistics": measure(kept)})
        data, wait = copy_to_host(exact_moments(kept))
        return Held(STATISTICS, data, wait=wait)

    def _find_room(self, size: int) -> bool:
        """Reserve memory: with last_steps that of older steps, else by waiting; False if it cannot suffice."""
        if size > self._memory.capacity:
            return False
        if self._config.last_steps is None:
            if not self._memory.reserve(size):
                self._writer.flush()  # or the writer might wait for more captures before it frees memory
                self._memory.reserve(size, wait=True)
            return True
        while not (found := self._memory.reserve(size)) and len(self._kept) > 1:
            self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        for _record, held in self._kept.popleft():
            self._memory.release(held.reserved)
            held.reserved, held.data = 0, None
