"""What must be the same for the sums of two runs to be added up."""

import hashlib
from functools import cache
from pathlib import Path

import torch
import transformers

REPOSITORY = Path(__file__).resolve().parents[2]
# What decides the numbers of a batch.
SOURCES = ("stages/scan", "stages/calibration/forward.py", "stages/metrics/loss.py", "models/capture", "models/ffn.py")


def sums_identity(fingerprint: str) -> dict[str, str]:
    """Settings, inputs and code of a scan."""
    return {
        "scan": fingerprint,
        "code": hash_code(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@cache
def hash_code() -> str:
    """SHA-256 of the source files that decide the numbers."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = REPOSITORY / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(REPOSITORY).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]
