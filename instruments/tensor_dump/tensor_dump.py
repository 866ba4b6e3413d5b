"""Dump the tensors of attention and of layers with a weight, in any training loop.

The model's results do not change, and transformers and megatron-core are not modified. Weights may be frozen and layers
recomputed; each process of a job writes its own files into the same folder.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.hooks import OwnHook, plain_name, refuse_replica, unwrap
from instruments.tensor_dump.config import DEFAULT_TENSORS, TENSORS, DumpConfig, read_control
from instruments.tensor_dump.index import Manifest, now
from instruments.tensor_dump.modules import find_coordinates, find_known, find_parallel
from instruments.tensor_dump.recorder import RankInfo, Recorder, Watched, rank_and_world
from instruments.tensor_dump.writer import DumpWriter

logger = logging.getLogger(__name__)


def find_modules(root: nn.Module) -> list[Watched]:
    """All modules that can be watched."""
    return [replace(one, name=plain_name(one.name)) for one in (*find_known(root), *find_parallel(root))]


def select(found: Sequence[Watched], config: DumpConfig) -> list[Watched]:
    """The modules that match a pattern and have a requested tensor. Raises ConfigError: a pattern matches no module."""
    names = [one.name for one in found]
    unmatched = [glob for glob in config.modules if not any(fnmatchcase(name, glob) for name in names)]
    if unmatched or not config.modules:
        kinds = sorted({name.rpartition(".")[2] for name in names})
        has = f"they are called {', '.join(kinds)}" if kinds else "the model has no layer and no attention known here"
        what = f"no module matches {', '.join(unmatched) or 'an empty list'}; {has}"
        do = f"modules=['*.{kinds[0]}']" if kinds else "dump a model of transformers or megatron-core"
        raise ConfigError(what, where="setting modules", do=do)
    matched = [one for one in found if any(fnmatchcase(one.name, glob) for glob in config.modules)]
    chosen = [one for one in matched if one.expected(config)]
    if not chosen:
        what = f"tensors={config.tensors}: the selected modules have none of them"
        do = f"tensors={[name for name in TENSORS[matched[0].layer_type] if name in DEFAULT_TENSORS]}"
        raise ConfigError(what, where=f"setting tensors; modules={config.modules}", do=do)
    return chosen


def unseen_weights(root: nn.Module, found: Sequence[Watched]) -> Iterator[str]:
    """Names of weight matrices outside all known layers."""
    seen = {id(parameter) for one in found for parameter in one.module.parameters()}
    for name, parameter in root.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in seen:
            yield plain_name(name)


def refuse_compiled(model: nn.Module) -> None:
    """Raise ConfigError if the model is compiled, or if torch.compile makes this call, and would trace the hooks."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    compiled = any(
        # A disabled torch.compile returns its argument.
        hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable") or isinstance(module, dynamo.OptimizedModule)
        for module in model.modules()
    )
    frame: FrameType | None = sys._getframe()
    while frame is not None and not compiled:
        # Calls that are not compiled, such as checkpointing, also have frames of torch._dynamo.
        compiled = frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and (
            frame.f_code.co_name == "compile_wrapper" or type(frame.f_locals.get("self")).__name__ == "OptimizedModule"
        )
        frame = frame.f_back
    if compiled:
        raise ConfigError(
            "the model is compiled: fused kernels have no inputs and outputs of layers to dump",
            where="TensorDump, torch.compile",
            do="TORCHDYNAMO_DISABLE=1 in the environment of this run, which makes torch.compile do nothing",
        )


_DUMPED: WeakSet[nn.Module] = WeakSet()


class TensorDump:
    """A dump of a running model, while the context is open.

    Args:
        model: of transformers, of megatron-core, or any with nn.Linear.
        folder: output folder; None takes TENSOR_SAVE_DIR. It must not hold a dump of this process yet.
        config: settings; None dumps everything.
        metadata: any JSON values, added to every record.
        environment: of the process. TENSOR_SAVE_ENABLED=0 disables the dump; TENSOR_SAVE_DIR is the default folder,
            CUSTOM_QUANT_TYPE the default label.
    Raises:
        ConfigError: an invalid setting, a pattern that matches no module, or metadata that is no JSON; (on entering)
            the model is compiled or already being dumped.
        ContractError: (on entering) the folder is in use.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path | str | None = None,
        config: DumpConfig | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Find the modules to watch; the model is changed only on entering."""
        named = None if folder is None else Path(folder)
        enabled, folder, self.config = read_control(named, config or DumpConfig(), environment)
        self.folder = folder.absolute()  # a script may change its folder
        self.metadata = dict(metadata or {})
        try:
            json.dumps(self.metadata)
        except (TypeError, ValueError) as error:
            what = f"the metadata is no JSON: {error}"
            raise ConfigError(what, where="TensorDump, metadata", do="metadata={'data': str(path)}") from error
        self.manifest: Manifest | None = None  # complete after the dump
        self._given, self.root = model, unwrap(model)
        self.identity = RankInfo(*rank_and_world(), find_coordinates(self.root))
        ranks = self.config.ranks
        self.enabled = enabled and (ranks is None or self.identity.rank in ranks)
        found = find_modules(self.root) if self.enabled else []
        self.watched = select(found, self.config) if self.enabled else []
        # If only some modules are requested, weights outside them are not reported.
        self._unseen = list(unseen_weights(self.root, found)) if self.enabled and "*" in self.config.modules else []
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
        self.manifest = Manifest({one.name: one.expected(config) for one in self.watched}, self._unseen)
        writer = DumpWriter(self.folder, rank_info.rank, header, config, self.manifest)
        recorder = Recorder(config, writer, rank_info, self.metadata)
        self._running, self._memory = (recorder, writer), writer.memory
        _DUMPED.update(modules)
        begin, end = OwnHook(lambda root, *_: self.begin_pass(root)), OwnHook(lambda *_: recorder.end_microbatch())
        self._hooks.enter_context(self.root.register_forward_pre_hook(begin))
        self._hooks.enter_context(self.root.register_forward_hook(end, always_call=True))
        for one in self.watched:
            for hook in one.hook(one, recorder):
                self._hooks.enter_context(hook)
        return self

    def begin_pass(self, root: nn.Module | None = None) -> None:
        """Count a forward pass: by a hook of `root`, or by the caller if the pass began before the dump."""
        if self._running is not None:
            refuse_compiled(self._given)
            refuse_replica(root, "TensorDump")
            self._running[0].begin_microbatch()

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

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Remove all hooks, write the rest (after an exception the last steps, too), warn of missing tensors."""
        self._hooks.close()
        if self._running is None or self.manifest is None:
            return
        _DUMPED.difference_update(one.module for one in self.watched)
        recorder, writer = self._running
        self._running = None
        # An exception may be the loop's own check of its loss.
        if kind is not None and issubclass(kind, Exception) and self.config.last_steps is not None:
            recorder.write_kept()
        recorder.close()
        writer.close()
        self.manifest.finish(recorder.dumped_steps, held_back=self.config.last_steps is not None)
        for complaint in self.manifest.complaints():
            logger.warning("tensor dump %s: %s", self.folder, complaint)
        if kind is None:
            writer.check()
        if writer.failure is None:
            self.manifest.write(self.folder, self.identity.rank)
