"""score → cluster: how much each neuron matters."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from stages.contracts.tensor_file import load_contract, save_contract


@dataclass(frozen=True)
class Scores:
    """(L, F) float32 scores; higher is more important, comparable within a layer only."""

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "scores.safetensors"

    method: str  # the measure
    description: str  # the same in words, with what it lacks
    chosen: Tensor

    def save(self, folder: Path) -> None:
        """Write `folder/scores.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "Scores":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)
