"""assemble → project, evaluate: the routers of a carve."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from stages.contracts.tensor_file import load_contract, save_contract


@dataclass(frozen=True)
class Routers:
    """One linear router per layer, without bias: logits = x @ rowsᵀ."""

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "routers.safetensors"

    method: str
    target: str  # architecture of the checkpoint they were made for
    dtype_asked: str  # its number format: as asked for (source: every tensor keeps its own) ...
    dtype: str  # ... and that of its experts
    rows: Tensor  # (L, E, D) float32, rounded to the checkpoint's number format

    def save(self, folder: Path) -> None:
        """Write `folder/routers.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "Routers":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)
