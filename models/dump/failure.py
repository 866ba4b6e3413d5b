"""What stopped the writer, in words, in the thread that trains."""

from pathlib import Path

from safetensors import SafetensorError

from models.dump.writer import DumpWriter
from models.errors import UserError


def explain_failure(writer: DumpWriter, folder: Path) -> None:
    """Raise what the writer met, once.

    Raises:
        UserError: the disk is full or forbids writing.
    """
    failure = writer.failure
    if failure is None or writer.told:
        return
    writer.told = True
    if not isinstance(failure, OSError | SafetensorError):
        raise failure
    raise UserError(
        f"the dump ended early, {writer.findings.lost} tensors are lost: {failure}",
        where=f"{folder}; what its index lists is whole",
        do="free some space or dump into another folder; or dump less: modules=[...], max_steps=, max_tokens=, "
        "keep=statistics",
    ) from failure
