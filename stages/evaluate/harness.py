"""Run lm-evaluation-harness with the tasks in this folder, and compare two models item by item."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from instruments.errors import ConfigError

TASKS = Path(__file__).with_name("tasks")
TASK = "carve_choices"


@dataclass(frozen=True)
class Answers:
    """One model's answers by item id: 1 right, 0 wrong."""

    right: Mapping[str, float]  # the answer of largest log-likelihood
    right_by_length: Mapping[str, float]  # of largest log-likelihood per character
    kinds: Mapping[str, str]

    def of_kind(self, kind: str) -> list[float]:
        """Right or wrong for every item of one kind."""
        return [self.right[name] for name, found in self.kinds.items() if found == kind]


@dataclass(frozen=True)
class MeanWithError:
    """A mean over items and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "MeanWithError":
        """Mean and standard error of values that count as independent."""
        drawn = list(values)
        error = stdev(drawn) / math.sqrt(len(drawn)) if len(drawn) > 1 else math.nan
        return cls(fmean(drawn), error)


def answer_choices(folder: Path, *, device: str, dtype: str, batch_size: int, limit: int | None = None) -> Answers:
    """Run all items, or the first `limit`, on a checkpoint.

    Raises:
        ConfigError: lm-evaluation-harness is not installed.
    """
    try:
        from lm_eval import simple_evaluate  # noqa: PLC0415 - an optional extra
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lm-evaluation-harness is not installed ({error.name} is missing)",
            where="python -m pipeline.harness",
            do="pip install -e '.[harness]'",
        ) from error
    import models.tiny_onn.register  # noqa: F401, PLC0415 - transformers then knows the project's own class

    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": dtype},
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        device=device,
        batch_size=batch_size,
        limit=limit,
        # `MeanWithError` computes the errors; the harness would draw 100,000 resamples.
        bootstrap_iters=0,
    )
    return collect_answers(found["samples"][TASK])


def collect_answers(samples: Sequence[Mapping[str, Any]]) -> Answers:
    """Collect the harness's log of each item."""
    return Answers(
        {sample["doc"]["id"]: float(sample["acc"]) for sample in samples},
        {sample["doc"]["id"]: float(sample["acc_norm"]) for sample in samples},
        {sample["doc"]["id"]: sample["doc"]["kind"] for sample in samples},
    )


def compare_answers(first: Answers, second: Answers) -> MeanWithError:
    """Accuracy of the second model minus that of the first.

    The items are the same, so the error is that of the differences per item. It is far smaller than the errors of the
    two accuracies if both models are mostly right or wrong together.
    """
    return MeanWithError.of(second.right[name] - first.right[name] for name in first.right)
