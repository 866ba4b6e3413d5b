"""Settings every test shares: one thread of arithmetic, shapes checked at every call, nothing fetched."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

# Everything imported below this line has its jaxtyping annotations enforced by beartype.
install_import_hook(["models", "stages"], "shape_checking.check")
