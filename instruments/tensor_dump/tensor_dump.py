"""Dump the tensors of attention and of layers with a weight, in any training loop.

The model's results do not change, and transformers and megatron-core are not modified. Weights may be frozen and layers
recomputed; each process of a job writes its own files into the same folder.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.hooks import WRAPPERS, OwnHook, plain_name
from instruments.tensor_dump.config import DEFAULT_TENSORS, TENSORS, DumpConfig, read_control
from instruments.tensor_dump.index import Manifest, now
from instruments.tensor_dump.modules import find_known, find_mesh_coordinates, find_transformer_engine
from instruments.tensor_dump.parts import RankInfo, rank_and_world
from instruments.tensor_dump.recorder import Recorder, Watched
from instruments.tensor_dump.writer import DumpWriter, HostMemory

logger = logging.getLogger(__name__)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, torch.compile or Megatron's Float16Module, with its plain names."""
    while len(inner := list(model.named_children())) == 1 and inner[0][0] in WRAPPERS:
        model = inner[0][1]
    return model


def find_modules(roots: Sequence[nn.Module]) -> list[Watched]:
    """All modules that can be watched, found by all adapters."""
    found: list[Watched] = []
    for number, root in enumerate(roots):
        prefix = f"chunk{number}" if len(roots) > 1 else ""
        mine = [*find_known(root, prefix), *find_transformer_engine(root, prefix)]
        if "megatron.core" in sys.modules:
            from instruments.tensor_dump.megatron_modules import find_megatron  # noqa: PLC0415 - an optional extra

            mine += find_megatron(root, prefix)
        found += [replace(one, name=plain_name(one.name), chunk=number) for one in mine]
    return found


def select(found: Sequence[Watched], config: DumpConfig) -> list[Watched]:
    """The modules that match a pattern and have a requested tensor. Raises ConfigError: a pattern matches no module."""
    unmatched = [glob for glob in config.modules if not any(fnmatchcase(one.name, glob) for one in found)]
    if unmatched or not config.modules:
        raise _nothing_matched(unmatched, found)
    matched = [one for one in found if any(fnmatchcase(one.name, glob) for glob in config.modules)]
    chosen = [one for one in matched if one.expected(config)]
    if not chosen:
        kinds = ", ".join(sorted({one.layer_type for one in matched}))
        what = f"tensors={config.tensors}: the selected modules have none of them"
        do = f"tensors={[name for name in TENSORS[matched[0].layer_type] if name in DEFAULT_TENSORS]}"
        raise ConfigError(what, where=f"setting tensors; modules={config.modules} are {kinds}", do=do)
    return chosen


def _nothing_matched(unmatched: Sequence[str], found: Sequence[Watched]) -> ConfigError:
    kinds = sorted({one.name.rpartition(".")[2] for one in found})
    has = f"they are called {', '.join(kinds)}" if kinds else "the model has no layer and no attention known here"
    example = f"modules=['*.{kinds[0]}']" if kinds else "dump a model of transformers or megatron-core"
    return ConfigError(
        f"no module matches {', '.join(unmatched) or 'an empty list'}; {has}", where="setting modules", do=example
    )


def unseen_weights(roots: Sequence[nn.Module], found: Sequence[Watched]) -> Iterator[str]:
    """Names of weight matrices outside all known layers."""
    seen = {id(parameter) for one in found for parameter in one.module.parameters()}
    for root in roots:
        for name, parameter in root.named_parameters():
            if parameter.ndim >= 2 and id(parameter) not in seen:
                yield plain_name(name)


def find_rank_info(roots: Sequence[nn.Module]) -> RankInfo:
    """Rank and world size in torch.distributed, and coordinates in the parallel groups."""
    rank, world = rank_and_world()
    if "megatron.core" in sys.modules:
        from instruments.tensor_dump.megatron_modules import find_coordinates  # noqa: PLC0415

        if found := find_coordinates():
            return RankInfo(rank, world, found)
    return RankInfo(rank, world, find_mesh_coordinates(roots))


def refuse_compiled_call() -> None:
    """Raise ConfigError if torch.compile makes this call, and would trace the hooks."""
    frame = sys._getframe() if "torch._dynamo" in sys.modules else None
    while frame is not None:
        # Calls that are not compiled, such as checkpointing, also have frames of torch._dynamo.
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and (
            frame.f_code.co_name == "compile_wrapper" or type(frame.f_locals.get("self")).__name__ == "OptimizedModule"
        ):
            raise _compiled_error()
        frame = frame.f_back


def refuse_compiled(roots: Sequence[nn.Module]) -> None:
    """Raise ConfigError if a model is compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    for module in (module for root in roots for module in root.modules()) if dynamo else ():
        # A disabled torch.compile returns its argument.
        in_place = hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable")
        if in_place or isinstance(module, dynamo.OptimizedModule):
            raise _compiled_error()


def _compiled_error() -> ConfigError:
    return ConfigError(
        "the model is compiled: fused kernels have no inputs and outputs of layers to dump",
        where="TensorDump, torch.compile",
        do="TORCHDYNAMO_DISABLE=1 in the environment of this run, which makes torch.compile do nothing; "
        "or dump before the model is compiled",
    )


_DUMPED: WeakSet[nn.Module] = WeakSet()


class TensorDump:
    """A dump of a running model, while the context is open.

    Args:
        model: of transformers, of megatron-core, or any with nn.Linear; a list for the chunks of a pipeline.
        folder: output folder; None takes TENSOR_SAVE_DIR. It must not hold a dump of this process yet.
        config: settings; None dumps everything.
        metadata: any JSON values, added to every record.
        environment: of the process. TENSOR_SAVE_ENABLED=0 disables the dump; TENSOR_SAVE_DIR is the default folder,
            CUSTOM_QUANT_TYPE the default label.
    Raises:
        ConfigError: an invalid setting, or a pattern that matches no module; (on entering) the model is compiled or
            already being dumped.
        ContractError: (on entering) the folder is in use.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        folder: Path | str | None = None,
        config: DumpConfig | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Find the modules to watch; the model is changed only on entering."""
        named = None if folder is None else Path(folder)
        enabled, self.folder, self.config = read_control(named, config or DumpConfig(), environment)
        self.metadata = dict(metadata or {})
        self.manifest: Manifest | None = None  # complete after the dump
        self._given = [model] if isinstance(model, nn.Module) else list(model)
        self._roots = [unwrap(one) for one in self._given]
        self.identity = find_rank_info(self._roots)
        ranks = self.config.ranks
        self.enabled = enabled and (ranks is None or self.identity.rank in ranks)
        found = find_modules(self._roots) if self.enabled else []
        self.watched = select(found, self.config) if self.enabled else []
        # If only some modules are requested, weights outside them are not reported.
        self._unseen = list(unseen_weights(self._roots, found)) if self.enabled and "*" in self.config.modules else []
        self._hooks = ExitStack()
        self._running: tuple[Recorder, DumpWriter] | None = None

    def __enter__(self) -> "TensorDump":
        if not self.enabled:
            return self
        refuse_compiled(self._given)
        modules = {one.module for one in self.watched}
        if modules & set(_DUMPED):
            what = "the model is being dumped already"
            do = "leave the first `with` block before the next, or dump all in one: modules=[...]"
            raise ConfigError(what, where="TensorDump", do=do)
        config, rank_info = self.config, self.identity
        header = {"started": now(), "world": rank_info.world, "config": asdict(config)}
        on_gpu = any(parameter.is_cuda for root in self._roots for parameter in root.parameters())
        self._memory = HostMemory(config.memory_mib * 2**20, pinned=on_gpu)
        self.manifest = Manifest({one.name: one.expected(config) for one in self.watched}, self._unseen)
        writer = DumpWriter(self.folder, rank_info.rank, header, self._memory, config, self.manifest)
        recorder = Recorder(config, writer, rank_info, self.metadata)
        self._running = recorder, writer
        _DUMPED.update(modules)
        for number, root in enumerate(self._roots):
            begin = OwnHook(lambda *_, chunk=number: self._begin_pass(chunk))
            end = OwnHook(lambda *_, chunk=number: recorder.end_microbatch(chunk))
            self._hooks.enter_context(root.register_forward_pre_hook(begin))
            self._hooks.enter_context(root.register_forward_hook(end, always_call=True))
        for one in self.watched:
            for hook in one.hook(one, recorder):
                self._hooks.enter_context(hook)
        return self

    def join_pass(self, model: nn.Module) -> None:
        """Count the forward pass of `model` that began before the dump: newly added hooks miss its start."""
        if model in self._roots:
            self._begin_pass(self._roots.index(model))

    def _begin_pass(self, chunk: int) -> None:
        if self._running is not None:
            refuse_compiled_call()
            self._running[0].begin_microbatch(chunk)

    @property
    def microbatches(self) -> int:
        """Forward passes with gradients in the current step."""
        return 0 if self._running is None else self._running[0].microbatches

    def step(self, loss: Tensor | float | None = None) -> None:
        """End a training step, after its backward pass; with `last_steps` a non-finite `loss` writes the kept steps.

        Raises:
            UserError: the disk is full or not writable; tensors listed in the index are complete.
        """
        if self._running is None:
            return
        recorder, writer = self._running
        asked = self.config.last_steps is not None and loss is not None
        recorder.end_step(finite=not asked or bool(torch.as_tensor(loss).isfinite().all()))
        writer.check()

    def flush(self) -> None:
        """Wait until all captures so far are on the disk. Raises UserError, like `step`."""
        if self._running is not None:
            writer = self._running[1]
            writer.flush().wait()
            writer.check()

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Remove all hooks, write the rest, warn of missing tensors."""
        self._hooks.close()
        if self._running is None or self.manifest is None:
            return
        _DUMPED.difference_update(one.module for one in self.watched)
        recorder, writer = self._running
        self._running = None
        recorder.close()
        writer.close()
        self.manifest.finish(recorder.dumped_steps, held_back=self.config.last_steps is not None)
        for complaint in self.manifest.complaints():
            logger.warning("tensor dump %s: %s", self.folder, complaint)
        if kind is None:
            writer.check()
        if writer.failure is None:
            self.manifest.write(self.folder, self.identity.rank)
