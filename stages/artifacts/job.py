"""What every stage gets from the pipeline, the processes that share its work, and what it gives back."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from instruments.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Longer than any worker waits for the slowest; a worker that died is noticed at once, by its closed connection.
_LOCK_TIMEOUT = timedelta(days=2)

Result = TypeVar("Result")


class LostWorkerError(UserError):
    """Another process of this job is gone."""


@dataclass(frozen=True)
class Workers:
    """This process among its like. For one process alone every method is a no-op."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process publishes results and speaks to the user."""
        return self.rank == 0

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Meet the other processes, and take leave of them.

        Raises:
            UserError: they cannot be met.
        """
        if self.world == 1:
            yield
            return
        import torch  # noqa: PLC0415 - settings are checked without torch
        import torch.distributed as dist  # noqa: PLC0415

        # Sums of a scan travel on the CPU, gradients of a training wherever they are.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, rank=self.rank, world_size=self.world, timeout=_LOCK_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            places = (f"{name}={os.environ.get(name, 'unset')}" for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
            raise UserError(
                f"the workers of this job cannot meet: {str(error).splitlines()[0]}",
                where=f"environment {', '.join(places)}",
                do="torchrun --nproc-per-node=2 -m pipeline ..., which sets them; without workers, unset RANK",
            ) from error
        try:
            yield
        finally:
            dist.destroy_process_group()

    def pick_device(self, asked: str) -> str:
        """The device of this process: where every worker is to have a GPU, its own."""
        import torch  # noqa: PLC0415 - settings are checked without torch

        if self.world == 1 or asked not in {"auto", "cuda"} or not torch.cuda.is_available():
            return asked
        return f"cuda:{self.local_rank % torch.cuda.device_count()}"

    def share(self, value: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled between trusted processes
        """What every process gave, in the order of their ranks. Raises LostWorkerError."""
        values = [value] * self.world
        self._exchange(lambda dist: dist.all_gather_object(values, value))
        return values

    def follow(self, value: Any) -> Any:  # noqa: ANN401 - anything that can be pickled
        """What the leading process gave. Raises LostWorkerError."""
        return self.share(value)[0]

    def lead(self, compute: Callable[[], Result]) -> Result:
        """What the leading process computes, for all; it holds no tensor on a GPU. Raises LostWorkerError."""
        return cast(Result, self.follow(compute() if self.leads else None))

    def reduce_(self, tensor: "Tensor", *, maximum: bool = False, at: int = 0) -> None:
        """Add up (or take the maximum of) everyone's tensor, in place, at one process; elsewhere it is of no use then.

        Raises:
            LostWorkerError: another process is gone.
        """
        self._exchange(lambda dist: dist.reduce(tensor, at, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM))

    def sum_(self, tensor: "Tensor") -> None:
        """Add up everyone's tensor, in place, at every process. Raises LostWorkerError."""
        self._exchange(lambda dist: dist.all_reduce(tensor))

    def copy_(self, tensor: "Tensor") -> None:
        """Overwrite everyone's tensor with the leading process's, in place. Raises LostWorkerError."""
        self._exchange(lambda dist: dist.broadcast(tensor, 0))

    def _exchange(self, collective: Callable[[Any], object]) -> None:
        """Call it with torch.distributed, unless this process is alone; a broken connection in words."""
        if self.world == 1:
            return
        import torch.distributed as dist  # noqa: PLC0415 - settings are checked without torch

        try:
            collective(dist)
        except RuntimeError as error:
            raise LostWorkerError(
                "another worker of this job is gone",
                where=f"worker {os.environ.get('RANK', '0')}: {str(error).splitlines()[0]}",
                do="see its own message, then the same command again: it goes on from what was flushed",
            ) from error


ALONE = Workers()


def find_workers(environment: Mapping[str, str] = os.environ) -> Workers:
    """The place torchrun gave this process (RANK, WORLD_SIZE, LOCAL_RANK), or alone."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return ALONE
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Workers(rank, world, int(environment.get("LOCAL_RANK", rank)))


@dataclass(frozen=True)
class Job:
    """One run of one stage.

    `out` is a private folder, published whole when the stage returns; `scratch` belongs to the same fingerprint and
    survives a kill, for stages that can go on where they stopped.
    """

    parents: Mapping[str, Path]
    out: Path
    scratch: Path
    fingerprint: str = ""
    workers: Workers = ALONE
    fresh: bool = False  # what earlier runs left elsewhere (a store) is to be forgotten


@dataclass(frozen=True)
class Table:
    """What a stage found, for the console and the run report."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = field(default=())


NOTHING = Table("", (), ())  # from a worker that does not lead
