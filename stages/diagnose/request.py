"""What a check is asked."""

from dataclasses import dataclass

from models.config import ModelConfig
from stages.contracts.job import Job
from stages.data.config import DataConfig
from stages.diagnose.config import DiagnoseConfig


@dataclass(frozen=True)
class Request:
    """The arguments of every check."""

    job: Job
    model: ModelConfig
    data: DataConfig
    settings: DiagnoseConfig
    seed: int
