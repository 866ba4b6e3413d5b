"""What the runs of one auto_diff share: the model in low precision, outputs that wait, choices that changed."""

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.precision.calls import Call, ModuleEvents, find_tensors, map_tensors
from instruments.precision.comparison import changed_rows, measure_distance, ulp
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.verdict import Distance

AUTOCAST, CAST = "autocast", "cast"
# What a module may raise for a number format that it was not written for.
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError)


class LowPrecision:
    """A model in low precision: the weights of the FP32 reference under autocast, or a copy that is cast."""

    def __init__(self, reference: nn.Module, dtype: torch.dtype, mode: str, cast: nn.Module | None) -> None:
        """Make what runs in low precision; `cast` is a copy that the caller has made. Raises ConfigError."""
        if mode not in {AUTOCAST, CAST}:
            raise ConfigError(
                f"mode={mode} is none of {AUTOCAST}, {CAST}", where="argument mode", do=f"mode={AUTOCAST}"
            )
        self.dtype, self.mode = dtype, mode
        self.model = reference if mode == AUTOCAST else cast or copy.deepcopy(reference).to(dtype)
        if mode == CAST:
            self.model.eval()

    def active(self, device: torch.device) -> AbstractContextManager[object]:
        """Within, modules of `model` compute in low precision."""
        return torch.autocast(device.type, self.dtype) if self.mode == AUTOCAST else nullcontext()

    def convert(self, arguments: Any, types: Sequence[torch.dtype | None] | None) -> Any:  # noqa: ANN401
        """FP32 arguments of a call, copied into the `types_of` it in low precision; None: the cast's own format."""
        count = len(find_tensors(arguments))
        if types is None or len(types) != count:
            types = [self.dtype if self.mode == CAST else None] * count
        kinds = iter(types)
        return map_tensors(lambda tensor: _convert(tensor, next(kinds)), arguments)


def types_of(arguments: Any) -> list[torch.dtype | None]:  # noqa: ANN401 - any input of a module
    """The number format of every tensor among the arguments of a call, None for what is no floating-point one."""
    return [tensor.dtype if tensor.is_floating_point() else None for tensor in find_tensors(arguments).values()]


def _convert(leaf: Tensor, kind: torch.dtype | None) -> Tensor:
    if kind is None or not leaf.is_floating_point():
        return leaf.clone()  # the module may write into it
    # The mask's −3e38 becomes the lowest value, not −inf: rows of it alone would give NaN.
    limit = torch.finfo(kind).max
    bounded = leaf.clamp(-limit, limit) if limit < torch.finfo(leaf.dtype).max else leaf
    return torch.where(leaf.isfinite(), bounded, leaf).to(kind, copy=True)


class Perturbation:
    """Adds or takes away one unit in the last place of a format, by a seeded coin for every value.

    Rounding to the nearest is off by a uniform half unit at most, so this is sqrt(12) times the noise of one rounding:
    a module may round about twelve times inside before it stands out.

    Source: Monte Carlo arithmetic (Parker 1997), with coins instead of uniform noise.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed, self._series = dtype, seed, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The values perturbed; integers, and values that are not finite, as they are."""
        if not values.is_floating_point() or not values.numel():
            return values.clone()
        generator = self._generators.get(values.device)
        if generator is None:
            generator = torch.Generator(values.device).manual_seed(self._series)
            self._generators[values.device] = generator
        coins = torch.randint(0, 2, values.shape, generator=generator, device=values.device).mul_(2).sub_(1)
        moved = values + coins * ulp(values.float(), self.dtype).to(values.dtype)
        return torch.where(values.isfinite(), moved, values)

    def restart(self, draw: int = 0) -> None:
        """Begin again with the first coin, of another series for every draw."""
        self._generators.clear()
        self._series = self.seed + draw

    def of(self, value: Any) -> Any:  # noqa: ANN401 - any input or output of a module
        """The same with all its tensors perturbed."""
        return map_tensors(self, value)

    @contextmanager
    def on_outputs(self, model: nn.Module) -> Iterator[None]:
        """Perturb what every module in it returns, as low precision rounds what one hands to the next."""

        def perturb(_module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
            return self.of(output)

        with ExitStack() as hooks:
            for module in model.modules():
                hooks.callback(module.register_forward_hook(perturb).remove)
            yield


@contextmanager
def kept_buffers(model: nn.Module, prefix: str = "", only: Container[str] | None = None) -> Iterator[set[str]]:
    """Give buffers back the values and the tensors that they have now; yields a set for the names of those changed.

    `prefix` is the name of a model that is itself a part; `only` are the full names of buffers that are kept.
    """
    changed: set[str] = set()
    held = []
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = ".".join(filter(None, (prefix, module_name, name)))
            if only is None or full in only:
                now = None if buffer is None else (buffer.clone(), buffer._version)
                held.append((full, module._buffers, name, buffer, now))
    try:
        yield changed
    finally:
        for full, owner, name, buffer, now in held:
            if owner.get(name) is not buffer or (buffer is not None and now is not None and buffer._version != now[1]):
                changed.add(full)
                owner[name] = buffer
                if buffer is not None and now is not None:
                    buffer.copy_(now[0])


Key = tuple[Call, str]
EMPTY: Mapping[Key, Tensor] = {}


def is_choice(tensor: Tensor) -> bool:
    """Whether it holds integers, row by row."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim > 0 and tensor.numel() > 0


class Choices(ModuleEvents):
    """Integer outputs of a pass, by call and path."""

    def __init__(self) -> None:
        self.made: dict[Key, Tensor] = {}

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Keep what was chosen."""
        self.made |= {(call, path): one.clone() for path, one in find_tensors(output).items() if is_choice(one)}


class AlikeRows:
    """Tokens for which two runs have chosen alike so far; the others went other ways, which no error measures."""

    def __init__(self, reference: Mapping[Key, Tensor] = EMPTY, low: Mapping[Key, Tensor] = EMPTY) -> None:
        """By the choices that both have made so far."""
        self._by_count: dict[int, Tensor] = {}
        self._sorted: set[int] = set()
        for key in [key for key in low if key in reference]:
            self.update(reference[key], low[key])

    def update(self, reference: Shaped[Tensor, "..."], low: Shaped[Tensor, "..."]) -> float | None:
        """Take one more choice into account; gives the share of rows that chose otherwise, None of another shape."""
        if reference.shape != low.shape:
            return None
        changed = changed_rows(reference, low.to(reference.device))
        if not torch.equal(reference, low.to(reference.device)):  # the order, too, decides how a sort breaks ties
            self._sorted.add(reference.numel())
        if len(changed) > 1:
            known = self._by_count.get(len(changed))
            self._by_count[len(changed)] = ~changed if known is None else known.to(changed.device) & ~changed
        return float(changed.double().mean())

    def distance(self, exact: Shaped[Tensor, "..."], found: Tensor | None) -> Distance | None:
        """Of the tokens that chose alike; of all, where none is left.

        None where shapes differ, and for a row each for every expert of every token: sorted by expert, one other choice
        moves them all.
        """
        if found is None or found.shape != exact.shape:
            return None
        count = exact.numel() // exact.shape[-1] if exact.ndim and exact.numel() else 0
        if count in self._sorted:
            return None
        rows = self._by_count.get(count)
        alike = rows.to(exact.device) if rows is not None and bool(rows.any()) and not bool(rows.all()) else None
        return measure_distance(exact, found.to(exact.device), alike)


@dataclass
class Session:
    """The models, and tensors that wait on the host: those of the low precision, then those of the reference."""

    reference: nn.Module
    low: LowPrecision
    perturbation: Perturbation
    device: torch.device
    wanted: frozenset[str]  # names of modules that are compared
    budget: int  # bytes that may wait
    diff: Diff  # what has been found
    waiting: dict[Key, Tensor] = field(default_factory=dict)
    types: dict[Call, list[torch.dtype | None]] = field(default_factory=dict)  # of arguments in low precision
    choosers: set[str] = field(default_factory=set)  # modules with integer outputs
    moving: set[str] = field(default_factory=set)  # buffers that the forward pass changes
    broken: dict[Key, Tensor] = field(default_factory=dict)  # where low precision has NaN or inf: inputs and outputs
    low_choices: dict[Key, Tensor] = field(default_factory=dict)
    reference_choices: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, OutputDiff] = field(default_factory=dict)
    choices: dict[Key, ChoiceDiff] = field(default_factory=dict)
    order: dict[Call, int] = field(default_factory=dict)
    windows: int = 0
    _seen: set[Key] = field(default_factory=set)
    _bytes: int = 0
    _left: bool = True

    def begin_window(self) -> bool:
        """Whether anything is left to compare; the passes that follow are about it."""
        if not self._left:
            return False
        self.waiting, self._bytes, self._left = {}, 0, False
        self.windows += 1
        return True

    def keep(self, key: Key, low: Tensor) -> None:
        """Let an output in low precision wait, if there is room; its reference will take as much as 4 bytes a value."""
        if key in self._seen or key[0].module not in self.wanted:
            return
        size = 4 * low.numel()
        if self.waiting and self._bytes + size > self.budget:
            self._left = True
            return
        self._bytes += size
        self._seen.add(key)
        self.waiting[key] = low.to("cpu", copy=True)

    def floor(self, perturbed: Distance, *, chained: bool) -> float:
        """What a perturbed run says of an output, at least half a unit in the last place; `chained`: a whole one.

        An output that consists of one huge value nearly is off by as much, whichever way the coins fell, and by more
        where it has gone through several modules.
        """
        return max(perturbed.normalised_l2, torch.finfo(self.low.dtype).eps * (1.0 if chained else 0.5))

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Start random numbers from the seed within; other generators do not move."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.perturbation.seed)
            yield

    def finish(self) -> None:
        """Put into `diff` what was found, in the order of the reference."""
        self.diff.outputs = sorted(self.outputs.values(), key=lambda output: self.order[output.call])
        self.diff.choices = sorted(self.choices.values(), key=lambda choice: self.order[choice.call])
        self.diff.only_one = [str(call) for call in self.types.keys() ^ self.order.keys()]
        called = {call.module for call in self.order}
        # The outermost modules that did not run, leaving out mere lists of modules.
        for name, module in self.reference.named_modules():
            runs = getattr(type(module), "forward", None) is not nn.Module.forward
            below = any(name.startswith(f"{outer}.") for outer in self.diff.unused)
            if name and runs and name not in called and not below:
                self.diff.unused.append(name)
