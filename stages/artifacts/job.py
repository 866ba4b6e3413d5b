"""The interface between pipeline and stage: the job, the worker processes, and the result table."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from instruments.errors import ConfigError, UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

# Longer than any wait for the slowest worker; a dead worker is noticed at once by its closed connection.
_COLLECTIVE_TIMEOUT = timedelta(days=2)

# Part of the remedy after a lost worker or server; fresh=true would discard what was flushed.
GO_ON = "then the same command, without fresh=true: it goes on from the last flush"

# In errors that are no end of another worker, which NCCL calls "remote process exited": their further lines say why.
_OWN_FAULTS = "invalid usage|out of memory|unhandled (cuda|system) error|CUDA error"

Result = TypeVar("Result")


class LostWorkerError(UserError):
    """Another worker of this job has ended."""


@dataclass(frozen=True)
class Workers:
    """The job's processes, seen from this one; with a single process no method communicates."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1  # processes on this machine

    @property
    def leads(self) -> bool:
        """Whether this process publishes results and writes to the console."""
        return self.rank == 0

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the other workers, unless they are, and disconnect at the end. Raises UserError: it fails."""
        if self.world == 1:
            yield
            return
        import torch  # noqa: PLC0415 - settings are checked without torch
        import torch.distributed as dist  # noqa: PLC0415

        if dist.is_initialized():
            yield
            return
        # Sums of a scan are exchanged on the CPU, gradients of training on the model's device.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, rank=self.rank, world_size=self.world, timeout=_COLLECTIVE_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            places = (f"{name}={os.environ.get(name, 'unset')}" for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
            what = f"the workers of this job cannot connect: {first_line(error)}"
            do = "torchrun --nproc-per-node=2 -m pipeline ..., which sets them; without workers, unset RANK"
            raise UserError(what, where=f"environment {', '.join(places)}", do=do) from error
        yield
        # Not after an error: NCCL would wait here for the others, who wait for this one. Its end tells them.
        dist.destroy_process_group()

    def pick_device(self, asked: str) -> str:
        """The requested device; of several workers on GPUs, each takes the one of its local rank.

        Raises:
            ConfigError: workers of this machine would share a GPU, and NCCL would refuse to sum their tensors.
        """
        if self.world == 1 or asked == "cpu":
            return asked
        import torch  # noqa: PLC0415 - settings are checked without torch

        if not torch.cuda.is_available():
            return asked
        found, numbered = torch.cuda.device_count(), asked not in {"auto", "cuda"}
        if self.local_world > (1 if numbered else found):
            raise ConfigError(
                f"{self.local_world} processes of this machine would share {asked if numbered else f'{found} GPUs'}",
                where=f"model.device={asked}, torchrun --nproc-per-node={self.local_world}",
                do=f"model.device=auto with --nproc-per-node={found} or fewer, or model.device=cpu",
            )
        return asked if numbered else f"cuda:{self.local_rank}"

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled between trusted processes
        """The values of all processes, by rank. Raises LostWorkerError."""
        values = [value] * self.world
        self._exchange(lambda dist: dist.all_gather_object(values, value))
        return values

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - anything that can be pickled
        """The value of the leading process. Raises LostWorkerError."""
        return self.gather(value)[0]

    def lead(self, compute: Callable[[], Result]) -> Result:
        """Compute in the leading process only; all get the result, without GPU tensors. Raises LostWorkerError."""
        return cast(Result, self.broadcast(compute() if self.leads else None))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Do something in one process of each machine after the other. Raises LostWorkerError."""
        turns = max(self.gather(self.local_world))
        for _ in range(self.local_rank):
            self.broadcast(None)
        yield
        for _ in range(self.local_rank, turns):
            self.broadcast(None)

    def reduce_(self, tensor: "Tensor", *, maximum: bool = False, at: int = 0) -> None:
        """Sum or maximum of all processes' tensors, in place in process `at`; undefined in the others.

        Raises:
            LostWorkerError: another worker has ended.
        """
        self._exchange(lambda dist: dist.reduce(tensor, at, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM))

    def sum_(self, tensor: "Tensor") -> None:
        """Sum of all processes' tensors, in place in every process. Raises LostWorkerError."""
        self._exchange(lambda dist: dist.all_reduce(tensor))

    def copy_(self, tensor: "Tensor") -> None:
        """Copy the leading process's tensor into those of the others. Raises LostWorkerError."""
        self._exchange(lambda dist: dist.broadcast(tensor, 0))

    def _exchange(self, collective: Callable[[Any], object]) -> None:
        """Run a collective if there are other workers; turn its RuntimeError into LostWorkerError."""
        if self.world == 1:
            return
        import torch.distributed as dist  # noqa: PLC0415 - settings are checked without torch

        with self.explained(sign=""):
            collective(dist)

    @contextmanager
    def explained(self, sign: str = "gloo|NCCL") -> Iterator[None]:
        """Turn a RuntimeError with this `sign`, which collectives raise, into LostWorkerError."""
        try:
            yield
        except RuntimeError as error:
            known = re.search(_OWN_FAULTS, str(error))  # every worker says why
            if self.world == 1 or known or not re.search(sign, str(error)):
                raise
            raise LostWorkerError(
                "another worker of this job is gone",
                where=f"worker {os.environ.get('RANK', '0')}: {first_line(error)}",
                do=f"see its own message, {GO_ON}",
            ) from error


ALONE = Workers()


def find_workers(environment: Mapping[str, str] = os.environ) -> Workers:
    """This process's rank from torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; `ALONE` without them."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return ALONE
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", world))
    return Workers(rank, world, *local)


@dataclass(frozen=True)
class Job:
    """One run of one stage.

    `out` is a private folder, published when the stage returns; `scratch` belongs to the fingerprint and survives a
    kill, so that a stage can resume.
    """

    parents: Mapping[str, Path]
    out: Path
    scratch: Path
    fingerprint: str = ""
    workers: Workers = ALONE
    fresh: bool = False  # also discard results of earlier runs outside of `scratch` (in a store)


@dataclass(frozen=True)
class Table:
    """A stage's results for the console and the run report."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = field(default=())


NOTHING = Table("", (), ())  # returned by workers that do not lead
