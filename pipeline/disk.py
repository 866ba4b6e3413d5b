"""Disk space: expected bytes of a stage, free bytes, and messages for a full or read-only disk."""

import errno
import math
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from instruments.errors import UserError
from models.config import MoEShape
from models.decoder import Decoder
from models.targets.config import select_target
from models.targets.config_json import count_carved, source_dtype
from pipeline.settings import Settings
from stages.artifacts.rendering import in_mib
from stages.assemble.config import AssembleConfig

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
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


def scratch_bytes(stage: str, source: Decoder, shape: MoEShape | None, settings: Settings) -> int:
    """Bytes at a stage's peak from which a killed run resumes, at most; 0 for stages that keep little."""
    if shape is None or stage not in {"project", "train"}:
        return 0
    assemble, train, layers = settings.assemble, settings.train, source.depth
    experts = 3 * source.hidden * shape.neurons(layers - len(shape.dense_layers))
    if stage == "project":  # the aligned layers, and the same layers after gradient projection
        width = BYTES.get(assemble.dtype, BYTES.get(source_dtype(source.config_json) or "", 2))
        return 0 if shape.pooled else experts * width * (1 + settings.project.gradient_projection)
    # The fp32 weights at the end of each phase; two checkpoints, with two moments, while a third is written.
    weights = expected_bytes(stage, source, shape, replace(assemble, dtype="float32"))
    trained = weights if train.all_share else 4 * experts * (train.experts_share > 0)
    phases = sum(share > 0 for share in (train.router_share, train.experts_share, train.all_share))
    saves = math.ceil(train.tokens / (train.batch * settings.data.max_length * train.save_steps))
    return (phases - 1) * weights + min(3, saves + 1) * (weights + 2 * trained)


def unfinished_bytes(stage_folder: Path) -> int:
    """Bytes in the hidden folders in which runs of a stage, killed or still active, keep unfinished results."""
    found = 0
    with suppress(OSError):  # just removed
        for path in (path for folder in stage_folder.glob(".*/") for path in folder.rglob("*")):
            found += path.lstat().st_size * path.is_file()
    return found


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
    """The UserError for a full disk or denied access; None for any other error.

    `error` is an OSError, or an error of safetensors or torch.save, which give the cause only in their text; `expected`
    are the bytes to write, 0 if unknown; `do` the remedy of a command without output_dir=.
    """
    hidden = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else hidden and int(hidden[1])
    if "inline_container.cc" in str(error):  # torch.save gives no number when the disk is full
        number = errno.ENOSPC
    if number in FULL:
        wanted = f"about {in_mib(expected)} wanted, " if expected else ""
        what = f"no room left on the disk: {wanted}{in_mib(free_bytes(folder))} free now"
        where = f"{where}, {folder}, {error}; unfinished files were removed, published ones are whole"
        remedy = "free some space, or output_dir= on another disk, then the same command again"
        return UserError(what, where=where, do=do or remedy)
    if number in DENIED:
        remedy = "check who may read and write there, or choose another output_dir="
        return UserError(f"access denied: {error}", where=f"{where}, {folder}", do=do or remedy)
    return None
