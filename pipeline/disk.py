"""Disk space: expected bytes of a stage, free bytes, and messages for a full or read-only disk."""

import errno
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from instruments.errors import UserError
from models.config import MoEShape
from models.targets.config import count_carved, select_target, source_dtype
from pipeline.settings import Settings
from stages.assemble.config import AssembleConfig
from stages.train.config import TrainConfig

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def expected_bytes(stage: str, source: Mapping[str, Any], shape: MoEShape | None, assemble: AssembleConfig) -> int:
    """Bytes that a stage publishes, to within about 1 %; 0 for stages that write little."""
    if shape is None or stage not in {"extract", "assemble", "project", "train"}:
        return 0
    width = BYTES.get(source_dtype(source) or "", 2)
    if stage == "extract":
        carved_layers = int(source["num_hidden_layers"]) - len(shape.dense_layers)
        return 3 * int(source["hidden_size"]) * shape.neurons(carved_layers) * width
    target = select_target(source, assemble.target, shape.always_on, pooled=shape.pooled)
    return count_carved(source, target, shape, assemble.pad_to).total * BYTES.get(assemble.dtype, width)


def scratch_bytes(stage: str, source: Mapping[str, Any], shape: MoEShape | None, settings: Settings) -> int:
    """Bytes at a stage's peak from which a killed run resumes, to within about 5 %; 0 for stages that keep little."""
    if shape is None or stage not in {"project", "train"}:
        return 0
    assemble, layers = settings.assemble, int(source["num_hidden_layers"]) - len(shape.dense_layers)
    experts = 3 * int(source["hidden_size"]) * shape.neurons(layers)
    if stage == "project":  # the aligned layers, and the same layers after gradient projection
        width = BYTES.get(assemble.dtype, BYTES.get(source_dtype(source) or "", 2))
        return 0 if shape.pooled else experts * width * (1 + settings.project.gradient_projection)
    fp32 = replace(assemble, dtype="float32")
    weights = expected_bytes(stage, source, shape, fp32)
    return _training_scratch(settings.train, settings.data.max_length, weights, 4 * experts)


def _training_scratch(train: TrainConfig, length: int, weights: int, experts: int) -> int:
    """Weights at the end of each phase, and two checkpoints with two moments of what learns while a third is written.

    `weights` and `experts` are their bytes in fp32.
    """
    most = finished = 0
    for share, learning in ((train.router_share, 0), (train.experts_share, experts), (train.all_share, weights)):
        if share > 0:
            saves = math.ceil(share * train.tokens / (train.batch * length * train.save_steps))
            one = weights + 2 * learning
            most = max(most, finished + min(2, saves) * one + (one if saves > 2 else weights))
            finished += weights
    return most


def unfinished_bytes(stage_folder: Path) -> int:
    """Bytes in the hidden folders in which runs of a stage, killed or still active, keep unfinished results."""
    found = 0
    for place, _folders, names in (entry for folder in stage_folder.glob(".*") for entry in os.walk(folder)):
        for name in names:
            with suppress(OSError):  # just removed
                found += Path(place, name).lstat().st_size
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


def in_mib(size: int) -> str:
    """A size as text."""
    return f"{size / 2**20:,.1f} MiB"
