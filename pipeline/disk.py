"""Disk space: expected bytes of a stage, free bytes, and messages for a full or read-only disk."""

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path

from instruments.errors import UserError
from models.config import MoEShape
from models.decoder import Decoder
from models.targets.config import select_target
from models.targets.config_json import count_carved, source_dtype
from stages.artifacts.rendering import in_mib
from stages.assemble.config import AssembleConfig

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
LOST = {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def expected_bytes(stage: str, source: Decoder, shape: MoEShape | None, assemble: AssembleConfig) -> int:
    """Bytes that a stage publishes, to within about 1 %; 0 for stages that write little."""
    if shape is None or stage not in {"extract", "assemble", "project", "train"}:
        return 0
    width = BYTES.get(source_dtype(source.config_json) or "", 2)
    if stage == "extract":
        carved_layers = source.depth - len(shape.dense_layers)
        return 3 * source.hidden * shape.neurons(carved_layers) * width
    target = select_target(source, assemble.target, shape)
    count = count_carved(source, target, shape, assemble.pad_to, tied=assemble.tied_embeddings)
    return count.total * BYTES.get(assemble.dtype, width)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(path: Path) -> Path:
    """The path itself, or its closest parent that exists; that of a folder that may not be entered is the folder.

    A link to a folder that does not exist, such as one on a disk that is not mounted, counts as existing.
    """
    path = path.absolute()
    with suppress(PermissionError):
        if path.exists() or path.is_symlink():
            return path
    return nearest_existing(path.parent)


def explain_os_error(
    error: BaseException, *, where: str, folder: Path, expected: int = 0, do: str = ""
) -> UserError | None:
    """The UserError for a full disk, denied access or a disk that fails; None for any other error.

    `error` is an OSError, or one of safetensors, which gives the cause only in its text; `expected` are the bytes to
    write, 0 if unknown; `do` the remedy of a command without output_dir=.
    """
    hidden = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else hidden and int(hidden[1])
    if number in FULL:
        wanted = f"about {in_mib(expected)} wanted, " if expected else ""
        what = f"no room left on the disk: {wanted}{in_mib(free_bytes(folder))} free now"
        where = f"{where}, {folder}, {error}; unfinished files were removed, published ones are whole"
        remedy = "free some space, or output_dir= on another disk, then the same command again"
        return UserError(what, where=where, do=do or remedy)
    if number in DENIED:
        remedy = "check who may read and write there, or choose another output_dir="
        return UserError(f"access denied: {error}", where=f"{where}, {folder}", do=do or remedy)
    if number in LOST:
        remedy = "see that it is mounted, then the same command again"
        return UserError(f"the disk fails: {error}", where=f"{where}, {folder}", do=do or remedy)
    return None
