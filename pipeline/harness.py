"""`python -m pipeline.harness CHECKPOINT ...`: compares the multiple-choice accuracy of checkpoints."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from instruments.errors import CheckpointError, ConfigError, exit_code, positive
from pipeline.gguf import no_checkpoint
from stages.evaluate.harness import Answers, MeanWithError, answer_choices, compare_answers

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 unreadable checkpoint, 2 wrong command line or no harness installed, 130 interrupted."""
    wanted = _parser().parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the checkpoints are local folders

    def work() -> None:
        if missing := [str(folder) for folder in wanted.checkpoints if not (folder / "config.json").is_file()]:
            error = no_checkpoint(*map(Path, missing))
            raise ConfigError(error.what, where=error.where, do=error.do)
        answers = {str(folder): _answer(folder, wanted) for folder in wanted.checkpoints}
        sys.stdout.write(show_answers(answers))

    return exit_code(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.harness",
        description="Run this project's multiple-choice set on checkpoints with lm-evaluation-harness.",
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="folders, the dense one first")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda ...")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="number format (default float32)")
    parser.add_argument("--batch-size", type=positive, default=16, help="answers per forward pass (default 16)")
    parser.add_argument("--limit", type=positive, help="number of items to use, from the first (default: all)")
    return parser


def _answer(folder: Path, wanted: argparse.Namespace) -> Answers:
    try:
        return answer_choices(
            folder, device=wanted.device, dtype=wanted.dtype, batch_size=wanted.batch_size, limit=wanted.limit
        )
    except (OSError, ValueError) as error:  # transformers cannot load the checkpoint
        raise CheckpointError(f"the harness cannot use this checkpoint: {error}", where=str(folder)) from error


def show_answers(answers: Mapping[str, Answers]) -> str:
    """Two tables, overall and by kind of item; differences are to the first checkpoint."""
    first = next(iter(answers.values()))
    kinds = list(dict.fromkeys(first.kinds.values()))
    rows, by_kind = [], []
    for name, found in answers.items():
        right, by_length = MeanWithError.of(found.right.values()), MeanWithError.of(found.right_by_length.values())
        above = "" if found is first else _percent(compare_answers(first, found), "+.1f")
        rows.append([name, _percent(right), _percent(by_length), above])
        by_kind.append([name, *(f"{100 * MeanWithError.of(found.of_kind(kind)).mean:.1f}" for kind in kinds)])
    overall = ["checkpoint", "accuracy, %", "by length, %", "above the first, points"]
    headers = ["accuracy, %", *(f"{kind} ({len(first.of_kind(kind))})" for kind in kinds)]
    return (
        f"{tabulate(rows, overall, disable_numparse=True)}\n\n{tabulate(by_kind, headers, disable_numparse=True)}\n\n"
        f"{len(first.right)} items; ± is one standard error, that of a difference taken item by item\n"
    )


def _percent(share: MeanWithError, form: str = ".1f") -> str:
    return f"{100 * share.mean:{form}} ± {100 * share.error:.1f}"


if __name__ == "__main__":
    sys.exit(main())
