"""`python -m pipeline mbpp CHECKPOINT ... --tasks mbpp.jsonl`: programming tasks that a checkpoint solves (MBPP).

Tasks 11 to 510, its test part; greedy pass@1, one answer each. The prompt is that of lm-evaluation-harness's
`mbpp_instruct` without examples: a user's message with task and asserts in the model's chat template, then an answer
that begins with an opened block of code. The answer ends with this block, since nothing after it is judged.

Source: arXiv:2108.07732.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from instruments.errors import ConfigError, DataError, check_output, exit_code, printable, say
from instruments.files import Kind, check_fields, kinds_of, write_text
from models.config import ModelConfig
from models.source import read_config, source_cache_key
from pipeline.artifacts import hold_lock
from pipeline.disk import explain_os_error
from pipeline.generate import add_limits
from pipeline.sandbox import SOLVED, judge, require_jail
from stages.artifacts.rendering import in_time

TEST_PART = range(11, 511)
TASK = "You are an expert Python programmer, and here is your task:\n{}\nYour code should pass these tests:\n{}"
OPENED, CLOSED = "```python\n", "```"
NO_CODE = "no code"


@dataclass(frozen=True)
class Task:
    """One task; the names are those of the published file."""

    task_id: int
    text: str
    test_setup_code: str  # run after the answer, before the asserts
    test_list: list[str]

    @property
    def prompt(self) -> str:
        """The task and its asserts, as the model reads them."""
        return TASK.format(self.text, "\n".join(self.test_list))

    @property
    def mark(self) -> str:
        """Hash of the prompt."""
        return sha256(self.prompt.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    """A line of the file of answers."""

    key: str  # hash of checkpoint and settings, "-", hash of the prompt
    model: str
    task_id: int
    answer: str
    tokens: int
    ended: bool  # its block of code, or all of it, before the limit
    seconds: float  # of its batch, per answer
    verdict: str = ""  # see `sandbox.judge`

    @property
    def mark(self) -> str:
        """Hash of the prompt; tasks of two files may have the same number."""
        return self.key.rpartition("-")[2]


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a checkpoint or a file cannot be read, 2 wrong command line or no jail."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline mbpp",
        description="Let checkpoints, dense or carved, solve the Python tasks of MBPP: greedy pass@1.",
    )
    told = "folders; without any, judge the answers in --out"
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="CHECKPOINT", help=told)
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="mbpp.jsonl as published")
    parser.add_argument("--out", type=Path, default=Path("mbpp_answers.jsonl"), metavar="FILE", help="answers; kept")
    parser.add_argument("--run-code", action="store_true", help="run the answers, shut in, and count the solved tasks")
    add_limits(parser, limit=len(TEST_PART), tokens=320)
    wanted = parser.parse_args(words)
    return exit_code(lambda: _work(wanted))


@contextmanager
def writing_answers(out: Path, program: str) -> Iterator[None]:
    """While a file of answers is written: no other process writes it; a full disk is explained. Raises UserError."""
    check_output(out)
    try:
        with hold_lock(out.with_name(f".{out.name}.lock"), task="writing these answers"):
            yield
    except OSError as error:
        do = "free some space there, or --out FILE in another folder, then the same command again"
        raise explain_os_error(error, where=program, folder=out.absolute().parent, do=do) or error from error


def _work(wanted: argparse.Namespace) -> None:
    with writing_answers(wanted.out, "mbpp") if wanted.checkpoints or wanted.run_code else nullcontext():
        tasks, answers = read_tasks(wanted.tasks)[: wanted.limit], read_answers(wanted.out)
        if not (wanted.checkpoints or answers):
            raise ConfigError("no checkpoint and no answers", where=str(wanted.out), do="name a checkpoint's folder")
        keys = {folder: answer_keys(folder, tasks, wanted.tokens, wanted.device) for folder in wanted.checkpoints}
        if wanted.run_code:
            require_jail()
        known = {answer.key for answer in answers}
        for folder, asked in keys.items():
            if missing := {key: task for key, task in asked.items() if key not in known}:
                for new in _generate(folder, missing, wanted):
                    answers += new
                    write_text(wanted.out, _as_lines(answers))
        if wanted.run_code:
            judge_answers(answers, tasks, wanted.out)
        shown, marks = {key for asked in keys.values() for key in asked}, {task.mark for task in tasks}
        say(render([one for one in answers if (one.key in shown if keys else one.mark in marks)]))
        say(f"\nanswers in {wanted.out}{'' if wanted.run_code else '; --run-code judges them'}\n")


def read_tasks(file: Path) -> list[Task]:
    """The tasks of the test part. Raises DataError."""
    tasks = [Task(**record) for record in _read_lines(file, kinds_of(Task)) if record["task_id"] in TEST_PART]
    if not tasks:
        raise DataError("no task from 11 to 510", where=str(file), do="mbpp.jsonl of google-research/mbpp")
    counts = Counter(task.task_id for task in tasks)
    if wrong := [task.task_id for task in tasks if not task.test_list or counts[task.task_id] > 1]:
        what = f"task {wrong[0]} has no asserts, or is there twice"
        raise DataError(what, where=str(file), do="mbpp.jsonl of google-research/mbpp, or remove the task")
    return tasks


def read_answers(file: Path) -> list[Answer]:
    """Answers of earlier runs. Raises DataError."""
    return [Answer(**record) for record in _read_lines(file, kinds_of(Answer))] if file.exists() else []


def _read_lines(file: Path, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file."""
    number = 0
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # noqa: B007
            check_fields(record := json.loads(line), kinds)
            yield {name: record[name] for name in kinds}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"not a file of records: {error}", where=f"{file}:{number}", do="name another file") from error


def _as_lines(answers: Iterable[Answer]) -> str:
    return "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)


def answer_keys(folder: Path, tasks: Iterable[Task], *settings: int | str) -> dict[str, Task]:
    """Key of an answer, of checkpoint, settings and prompt → task. Raises CheckpointError: no checkpoint."""
    mark = checkpoint_mark(folder, *settings)
    return {f"{mark}-{task.mark}": task for task in tasks}


def checkpoint_mark(folder: Path, *settings: int | str) -> str:
    """Hash of a checkpoint and settings. Raises CheckpointError: no checkpoint."""
    read_config(folder)
    stated = json.dumps([source_cache_key(ModelConfig(kind="local", path=str(folder))), settings], sort_keys=True)
    return sha256(stated.encode()).hexdigest()[:16]


def _generate(folder: Path, asked: Mapping[str, Task], wanted: argparse.Namespace) -> Iterator[list[Answer]]:
    """Let a checkpoint answer tasks, named by their keys; yields the answers of a batch."""
    from pipeline.greedy import open_writer  # noqa: PLC0415 - slow, and the help page does not need it

    with (
        open_writer(folder, wanted.device) as writer,
        tqdm(total=len(asked), desc=printable(folder.name), unit="task") as progress,
    ):
        prompts = {key: writer.encode(task.prompt, chat=True, opened=OPENED) for key, task in asked.items()}
        ordered = sorted(prompts, key=lambda key: len(prompts[key]))  # so that batches need little padding
        begin = perf_counter()
        for batch, found in writer.write_all([prompts[key] for key in ordered], wanted.tokens, stop=CLOSED):
            seconds, begin = (perf_counter() - begin) / len(batch), perf_counter()
            yield [
                Answer(key, str(folder), asked[key].task_id, OPENED + text, tokens, ended, seconds)
                for key, (text, tokens, ended) in zip(ordered[batch.start : batch.stop], found, strict=True)
            ]
            progress.update(len(batch))


def extract_code(answer: str) -> str:
    """The block of code at the beginning of an answer, whose end may be missing; "" if it defines nothing."""
    code = answer.removeprefix(OPENED).partition(CLOSED)[0]
    return code if re.search(r"\b(?:def|class|import)\b|=", code) else ""


def judge_answers(answers: list[Answer], tasks: Iterable[Task], file: Path) -> None:
    """Give answers to `tasks` their missing verdicts, and write all to the file: now and then, and if interrupted."""
    tests = {task.mark: "\n".join([task.test_setup_code, *task.test_list]) for task in tasks}
    missing = [place for place, one in enumerate(answers) if not one.verdict and one.mark in tests]
    try:
        for number, place in enumerate(tqdm(missing, desc="judge", unit="answer"), start=1):
            answer = answers[place]
            code = extract_code(answer.answer)
            answers[place] = replace(answer, verdict=judge(code, tests[answer.mark]) if code else NO_CODE)
            if number % 50 == 0:
                write_text(file, _as_lines(answers))
    finally:
        write_text(file, _as_lines(answers))


def render(answers: Iterable[Answer]) -> str:
    """One row a checkpoint and settings: solved tasks with the standard deviation of their share, uniform prior."""
    groups: dict[tuple[str, str], dict[str, Answer]] = defaultdict(dict)
    for answer in answers:  # a path such as outputs/latest/checkpoint may have named several checkpoints
        groups[answer.model, answer.key.rpartition("-")[0]][answer.key] = answer
    names, rows = [model for model, _ in groups], []
    for (model, mark), given in ((group, found.values()) for group, found in groups.items()):
        solved, count = sum(answer.verdict == SOLVED for answer in given), len(given)
        likely = (solved + 1) / (count + 2)
        error = sqrt(likely * (1 - likely) / (count + 3))
        judged = all(answer.verdict for answer in given)
        shown = (f"{solved} of {count}", f"{solved / count:.1%} ± {error:.1%}") if judged else (f"– of {count}", "–")
        empty = sum(not extract_code(answer.answer) for answer in given)
        tokens, seconds = sum(answer.tokens for answer in given), sum(answer.seconds for answer in given)
        name = f"{model} {mark[:4]}" if names.count(model) > 1 else model
        rows.append([name, *shown, sum(not answer.ended for answer in given), empty, tokens, in_time(seconds)])
    columns = ["model", "solved", "share", "no end", "no code", "tokens", "time"]
    return tabulate(rows, columns, tablefmt="github", disable_numparse=True) + "\n"
