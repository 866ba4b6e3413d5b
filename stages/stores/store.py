"""What a scan asks of the place that keeps its sums."""

from typing import Protocol

from stages.stores.sums import ScanSums


class SumStore(Protocol):
    """Keeps the parts of a scan; whatever happens, each batch is in it once or not at all."""

    # Whether all workers write to one place: then `collect` gives the sums of all of them, else this worker's.
    shared: bool

    @property
    def sums(self) -> ScanSums:
        """Where to add batches; they survive a kill after the next flush."""

    def done(self) -> set[int]:
        """Batches that need not be read again, as far as this process can see."""

    def forget(self) -> None:
        """Start from nothing, where not shared: other workers have these batches."""

    def due(self) -> bool:
        """Whether the last flush lies `checkpoint_every` seconds back."""

    def flush(self) -> None:
        """Make everything added so far survive a kill.

        A store that finds some of these batches done by another worker drops all of them: what is then missing from
        `done` is read again.
        """

    def collect(self) -> ScanSums:
        """The sums of every batch in `done`, after a flush."""

    def close(self) -> None:
        """Let go of connections; what was not flushed is lost."""
