"""Settings every test shares: one thread of arithmetic, shapes checked at every call, nothing fetched."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from jaxtyping import install_import_hook

# Everything imported below this line has its jaxtyping annotations enforced by beartype.
install_import_hook(["models", "stages"], "shape_checking.check")


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports():
    """Every stage begins by collecting garbage: what is imported need not be searched each time."""
    gc.collect()
    gc.freeze()
