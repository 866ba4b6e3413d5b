"""Dump what attention and Linear layers compute, around anybody's training loop.

    with TensorDump(model, "dump") as dump:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            dump.step(loss)

Nothing the model computes changes, and no file of transformers or megatron-core does. Weights may be frozen, layers may
be recomputed, the processes of a job each write their own part into the same folder.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.tensor_dump.capture import HostRing, RankInfo, Watched, select, unseen_weights, warn_of_label
from instruments.tensor_dump.config import ATTENTION, EXPERTS, DumpConfig, read_control
from instruments.tensor_dump.index import IndexFile, now
from instruments.tensor_dump.modules import (
    AttentionWatch,
    find_attentions,
    find_experts,
    find_linears,
    find_mesh_coordinates,
    watch_experts,
    watch_linear,
)
from instruments.tensor_dump.recorder import Recorder, watch_microbatches
from instruments.tensor_dump.writer import DumpWriter, Manifest, explain_failure, warn_of


class Handle(Protocol):
    """What takes a hook off."""

    def remove(self) -> None:
        """Once."""


def find_modules(roots: Sequence[nn.Module]) -> list[Watched]:
    """All that can be watched, by every adapter that knows a part of the model."""
    found: list[Watched] = []
    for number, root in enumerate(roots):
        prefix = f"chunk{number}" if len(roots) > 1 else ""
        mine = [*find_linears(root, prefix), *find_attentions(root, prefix), *find_experts(root, prefix)]
        if "megatron.core" in sys.modules:
            from instruments.tensor_dump.megatron_modules import find_megatron  # noqa: PLC0415 - an optional extra

            mine += find_megatron(root, prefix)
        found += [replace(one, chunk=number) for one in mine]
    return found


def watch(one: Watched, recorder: Recorder) -> Sequence[Handle]:
    """Put the adapter's hooks on a module."""
    if isinstance(one.module, nn.Linear):
        return watch_linear(one, recorder)
    if one.layer_type == EXPERTS:
        return watch_experts(one, recorder)
    if "megatron.core" in sys.modules:
        from instruments.tensor_dump.megatron_modules import is_megatron, watch_megatron  # noqa: PLC0415

        if is_megatron(one.module):
            return watch_megatron(one, recorder)
    assert one.layer_type == ATTENTION
    return [AttentionWatch(one, recorder)]


def find_rank_info(roots: Sequence[nn.Module]) -> RankInfo:
    """This process among those of its job: torch.distributed's rank, and coordinates where there are any."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return RankInfo(0, 1, {})
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "megatron.core" in sys.modules:
        from instruments.tensor_dump.megatron_modules import find_coordinates  # noqa: PLC0415

        if found := find_coordinates():
            return RankInfo(rank, world, found)
    return RankInfo(rank, world, find_mesh_coordinates(roots))


_DUMPED: WeakSet[nn.Module] = WeakSet()


class TensorDump:
    """A dump of a running model, from entering to leaving.

    Args:
        model: of transformers, of megatron-core, or any with nn.Linear; several for the chunks of a pipeline.
        folder: where to; None takes TENSOR_SAVE_DIR. It must not hold a dump of this process yet.
        config: what; None takes everything.
        metadata: anything that JSON can hold, for every record.
        environment: of the process, where TENSOR_SAVE_ENABLED=0 switches the dump off, TENSOR_SAVE_DIR names a folder
            and CUSTOM_QUANT_TYPE a label where the arguments name none.
    Raises:
        ConfigError: a setting without meaning, a pattern that names no module.
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
        """Find what to watch; the model is touched only on entering."""
        control = read_control(None if folder is None else Path(folder), config or DumpConfig(), environment)
        self.config, self.folder, self.metadata = control.config, control.folder, dict(metadata or {})
        self.manifest: Manifest | None = None  # when it has ended
        self._roots = [model] if isinstance(model, nn.Module) else list(model)
        self.identity = find_rank_info(self._roots)
        ranks = self.config.ranks
        self.enabled = control.enabled and (ranks is None or self.identity.rank in ranks)
        found = find_modules(self._roots) if self.enabled else []
        self.watched = select(found, self.config) if self.enabled else []
        self._unseen = list(unseen_weights(self._roots, found)) if self.enabled else []
        self._handles: list[Handle] = []
        self._running: tuple[Recorder, DumpWriter, IndexFile] | None = None

    def __enter__(self) -> "TensorDump":
        """Put the hooks on the model."""
        if not self.enabled:
            return self
        modules = {one.module for one in self.watched}
        if modules & set(_DUMPED):
            raise ConfigError(
                "the model is being dumped already",
                where="TensorDump",
                do="leave the first `with` block before the next, or dump all in one: modules=[...]",
            )
        header = {"started": now(), "world": self.identity.world, "config": asdict(self.config)}
        index = IndexFile(self.folder, self.identity.rank, header)
        on_gpu = any(parameter.is_cuda for root in self._roots for parameter in root.parameters())
        ring = HostRing(self.config.memory_mib * 2**20, pinned=on_gpu)
        writer = DumpWriter(self.folder, index, ring, self.config, self.identity, self.metadata)
        recorder = Recorder(self.config, writer, ring, rank=self.identity.rank, world=self.identity.world)
        self._running, self._ring = (recorder, writer, index), ring
        _DUMPED.update(modules)
        self._handles = [watch_microbatches(root, number, recorder) for number, root in enumerate(self._roots)]
        for one in self.watched:
            self._handles += watch(one, recorder)
        if self.config.quant_type is not None:
            warn_of_label(self.config.quant_type, self.watched)
        return self

    def step(self, loss: Tensor | float | None = None) -> None:
        """A training step has ended, the backward pass included.

        Args:
            loss: with `last_steps`, what decides whether the last steps are written.
        Raises:
            UserError: the disk is full, or forbids writing; what the index lists is whole.
        """
        if self._running is None:
            return
        recorder, writer, _index = self._running
        asked = self.config.last_steps is not None and loss is not None
        recorder.end_step(finite=not asked or bool(torch.as_tensor(loss).isfinite().all()))
        explain_failure(writer, self.folder)

    def flush(self) -> None:
        """Wait until everything captured so far is on the disk. Raises UserError, as `step` does."""
        if self._running is not None:
            self._running[1].flush().wait()
            explain_failure(self._running[1], self.folder)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Take every hook off, write what is left, say what is missing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._running is None:
            return
        _DUMPED.difference_update(one.module for one in self.watched)
        recorder, writer, index = self._running
        self._running = None
        recorder.close()
        writer.close()
        index.close()
        self.manifest = Manifest.of(
            self.watched, writer.findings, self.config, steps=recorder.dumped_steps, unseen=self._unseen
        )
        warn_of(self.manifest, self.config, self.folder)
        if kind is None:
            explain_failure(writer, self.folder)
        if writer.failure is None:
            self.manifest.write(self.folder, self.identity.rank)
