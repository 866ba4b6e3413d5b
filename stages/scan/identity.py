"""What must be the same for the sums of two runs to be added up."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import transformers

from stages.data.batches import TokenBatch

REPOSITORY = Path(__file__).resolve().parents[2]
# What decides the numbers of a batch.
SOURCES = (
    "stages/scan",
    "stages/calibration/forward.py",
    "stages/metrics/loss.py",
    "models/capture",
    "models/ffn.py",
    "models/loading.py",
    "models/quantization.py",
)


def sums_identity(fingerprint: str, batches: Iterable[TokenBatch], dtype: torch.dtype) -> dict[str, str]:
    """Settings, inputs and code of a scan.

    Args:
        fingerprint: of its settings.
        batches: what is read. The settings alone do not fix it: a model writes other text on other hardware.
        dtype: the model's, which on its part depends on the device where the settings leave it open.
    """
    return {
        "scan": fingerprint,
        "text": hash_text(batches),
        "dtype": str(dtype).removeprefix("torch."),
        "code": hash_code(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hash_text(batches: Iterable[TokenBatch]) -> str:
    """SHA-256 of token ids, labels and padding, batch by batch."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(repr(tuple(batch.input_ids.shape)).encode())
        for tensor in (batch.input_ids, batch.labels, batch.attention_mask):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def hash_code() -> str:
    """SHA-256 of the source files that decide the numbers."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = REPOSITORY / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(REPOSITORY).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]
