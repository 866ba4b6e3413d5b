"""`python -m pipeline harness CHECKPOINT ...`: compares checkpoints item by item, by lm-evaluation-harness."""

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tabulate import tabulate

from instruments.errors import ConfigError, exit_code, positive
from models.config import ModelConfig
from pipeline.clients import no_checkpoint, readable_copy
from pipeline.help import REPOSITORY

TASKS = REPOSITORY / "stages/evaluate/tasks"
TASK = "carve_choices"


# The harness's log of a model's items: the item is `doc`; `acc` is 1 if the answer of largest log-likelihood is right,
# `acc_norm` if that of largest log-likelihood per character is.
Answers = Sequence[Mapping[str, Any]]


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean of values that count as independent, and its standard error."""
    drawn = list(values)
    return fmean(drawn), stdev(drawn) / math.sqrt(len(drawn)) if len(drawn) > 1 else math.nan


def answer_choices(folder: Path, *, device: str, dtype: str, batch_size: int, limit: int | None = None) -> Answers:
    """Run all items, or the first `limit`, on a checkpoint.

    The harness itself would draw missing weights at random and take an empty tokenizer.
    Raises:
        CheckpointError: weights or tokenizer are missing or unusable.
        ConfigError: lm-evaluation-harness is not installed, or there is no such device.
    """
    try:
        from lm_eval import simple_evaluate  # noqa: PLC0415 - an optional extra
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ModuleNotFoundError as error:
        what = f"lm-evaluation-harness is not installed ({error.name} is missing)"
        raise ConfigError(what, where="python -m pipeline harness", do="pip install -e '.[harness]'") from error
    import models.tiny_onn.register  # noqa: F401, PLC0415 - transformers then knows the project's own class
    from models.loading import load_tokenizer, load_whole, resolve_device  # noqa: PLC0415

    try:
        place = resolve_device(ModelConfig(device=device))
    except ConfigError as error:
        raise ConfigError(error.what, where=f"--device {device}", do="--device cpu") from error
    with readable_copy(folder) as seen:
        tokenizer = load_tokenizer(seen, trust_remote_code=False)
        model = load_whole(seen, dtype=dtype, device_map={"": place})
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        limit=limit,
        # `mean_and_error` computes the errors; the harness would draw 100,000 resamples.
        bootstrap_iters=0,
    )
    answers: Answers = found["samples"][TASK]
    return answers


DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 unreadable checkpoint, 2 wrong command line or no harness installed, 130 interrupted."""
    wanted = _parser().parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the checkpoints are local folders

    def work() -> None:
        if missing := [str(folder) for folder in wanted.checkpoints if not (folder / "config.json").is_file()]:
            error = no_checkpoint(*map(Path, missing))
            raise ConfigError(error.what, where=error.where, do=error.do)
        settings = {name: getattr(wanted, name) for name in ("device", "dtype", "batch_size", "limit")}
        answers = {str(folder): answer_choices(folder, **settings) for folder in wanted.checkpoints}
        sys.stdout.write(show_answers(answers))

    return exit_code(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline harness",
        description="Run this project's multiple-choice set on checkpoints with lm-evaluation-harness.",
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="folders, the dense one first")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda ...")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="number format (default float32)")
    parser.add_argument("--batch-size", type=positive, default=16, help="answers per forward pass (default 16)")
    parser.add_argument("--limit", type=positive, help="number of items to use, from the first (default: all)")
    return parser


def show_answers(answers: Mapping[str, Answers]) -> str:
    """Two tables, overall and by kind of item; differences are to the first checkpoint.

    The items are the same, so the error of a difference is that of the differences per item. It is far smaller than
    the errors of the two accuracies if both models are mostly right or wrong together.
    """
    first = next(iter(answers.values()))
    kinds = Counter(item["doc"]["kind"] for item in first)
    before = {item["doc"]["id"]: item["acc"] for item in first}
    rows, by_kind = [], []
    for name, items in answers.items():
        row = [name, *(_percent(*mean_and_error(item[figure] for item in items)) for figure in ("acc", "acc_norm"))]
        above = mean_and_error(item["acc"] - before[item["doc"]["id"]] for item in items)
        rows.append([*row, "" if items is first else _percent(*above, "+.1f")])
        right = {kind: [item["acc"] for item in items if item["doc"]["kind"] == kind] for kind in kinds}
        by_kind.append([name, *(f"{100 * fmean(found):.1f}" for found in right.values())])
    overall = ["checkpoint", "accuracy, %", "by length, %", "above the first, points"]
    headers = ["accuracy, %", *(f"{kind} ({count})" for kind, count in kinds.items())]
    return (
        f"{tabulate(rows, overall, disable_numparse=True)}\n\n{tabulate(by_kind, headers, disable_numparse=True)}\n\n"
        f"{len(first)} items; ± is one standard error, that of a difference taken item by item\n"
    )


def _percent(mean: float, error: float, form: str = ".1f") -> str:
    return f"{100 * mean:{form}} ± {100 * error:.1f}"
