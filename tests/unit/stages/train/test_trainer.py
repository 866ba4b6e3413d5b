"""Arguments that a phase passes to Trainer."""

import torch

from stages.artifacts.job import Workers
from stages.train.config import TrainConfig
from stages.train.phases import Phase
from stages.train.routers import Balance, LogitSchedule
from stages.train.text import TrainingText
from stages.train.trainer import TrainContext, training_arguments


def test_shards_are_set_up_as_the_file_says(tmp_path):
    (tmp_path / "fsdp.json").write_text('{"reshard_after_forward": false}')
    context = TrainContext(
        settings=TrainConfig(fsdp=True, fsdp_config=str(tmp_path / "fsdp.json")),
        text=TrainingText([], [], 0),
        schedule=LogitSchedule(1.0, 1.0, 1),
        total=1,
        balance=Balance("none", 0.0),
        pooled=False,
        teacher=None,
        record=None,
        seed=0,
        workers=Workers(),
        device=torch.device("cpu"),
    )
    arguments = training_arguments(context, Phase("all", 0, 1, frozenset()), tmp_path)
    assert arguments.fsdp
    assert arguments.fsdp_config["reshard_after_forward"] is False
