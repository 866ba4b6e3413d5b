"""`python -m pipeline answer MODEL --text FILE --out FILE.jsonl`: a chat model's own answers, as text for its carve.

A carve whose text its dense model has written keeps more of what that model writes than one with other people's text.
"""

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from instruments.errors import ConfigError, DataError, exit_code, say
from instruments.files import write_text
from pipeline.compare import explained_text
from pipeline.generate import add_limits
from pipeline.mbpp import checkpoint_mark, writing_answers

if TYPE_CHECKING:
    from stages.text.documents import Document

MODEL, QUESTION = "model", "question"  # hashes, beside the messages
NO_QUESTION, COPY, NO_ROOM = "no conversation with a question", "the same question again", "too long for the model"
NO_END, EMPTY, REFUSED = "no end within --tokens", "empty", "changed by the chat template, or without an embedding"

IN_VAIN = 32  # answers after which the others are not asked for, if none of them is text


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the model or the text cannot be read, 2 wrong command line."""
    told = "Let a chat model answer conversations, greedily, and write both as text to carve it and to train the carve."
    parser = argparse.ArgumentParser(prog="python -m pipeline answer", description=told)
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the dense model")
    told = "conversations, or a folder of them; their last answers are not read"
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help=told)
    told = "JSON lines, kept: only questions without an answer here are asked"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=told)
    add_limits(parser, limit=10_000, tokens=256)
    wanted = parser.parse_args(words)
    return exit_code(lambda: _work(wanted))


def _work(wanted: argparse.Namespace) -> None:
    mark = checkpoint_mark(wanted.model)
    if wanted.out.suffix != ".jsonl":  # by which the lines are read as records
        do = f"--out {shlex.quote(str(wanted.out.with_suffix('.jsonl')))}"
        raise ConfigError("the answers are JSON lines", where=f"--out {wanted.out}", do=do)
    with writing_answers(wanted.out, "answer"):
        _answer(wanted, mark)


def _answer(wanted: argparse.Namespace, mark: str) -> None:
    lines, left_out = read_lines(wanted.out, mark), Counter[str]()
    with explained_text(wanted.text):
        questions = read_questions(wanted.text, wanted.limit, left_out)
    if asked := {key: question for key, question in questions.items() if key not in lines}:
        for batch in _write(asked, wanted, left_out):
            for key, answered in batch.items():
                record = {"messages": answered.messages, "tools": answered.tools, MODEL: mark, QUESTION: key}
                lines[key] = json.dumps(record) + "\n"
            if batch:
                write_text(wanted.out, "".join(lines.values()))
            if not lines and sum(left_out[fault] for fault in (NO_END, EMPTY, REFUSED)) >= IN_VAIN:
                break  # such as a model whose template drops its thoughts
    faults = "; ".join(f"{count:,} {fault}" for fault, count in left_out.items() if count)
    if not lines:
        do = "a larger --tokens, other questions, or a model whose chat template keeps its answers whole"
        raise DataError("no answer is text for a carve", where=f"--text {wanted.text}: {faults}", do=do)
    say(f"{len(lines):,} answers in {wanted.out}; left out: {faults or 'none'}\n")


def _write(
    asked: Mapping[str, "Document"], wanted: argparse.Namespace, left_out: Counter[str]
) -> Iterator[dict[str, "Document"]]:
    """The conversations of a batch with their answers, without those that are no text for a carve."""
    from pipeline.greedy import open_writer  # noqa: PLC0415 - slow, and the help page does not need it

    with open_writer(wanted.model, wanted.device) as opened:
        writer = replace(opened, special=True)
        writer.require_template()
        encoded = {key: writer.encode_question(question) for key, question in asked.items()}
        prompts = {key: ids for key, ids in encoded.items() if ids}
        fitting = [key for key, ids in prompts.items() if len(ids) + wanted.tokens <= writer.longest]
        left_out[REFUSED], left_out[NO_ROOM] = len(asked) - len(prompts), len(prompts) - len(fitting)
        progress = tqdm(total=len(fitting), unit="answer")
        for batch, found in writer.write_all([prompts[key] for key in fitting], wanted.tokens):
            kept = {}
            for key, (said, _, ended) in zip(fitting[batch.start : batch.stop], found, strict=True):
                if not ended:
                    left_out[NO_END] += 1
                elif not said.strip():
                    left_out[EMPTY] += 1
                elif answered := writer.join(asked[key], said):
                    kept[key] = answered
                else:
                    left_out[REFUSED] += 1
            yield kept
            progress.update(len(batch))


def read_lines(file: Path, mark: str) -> dict[str, str]:
    """The lines of an earlier run, by the hashes of their questions.

    Raises UserError: the file holds something else, or another model's answers.
    """
    lines: dict[str, str] = {}
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else (), start=1):
        try:
            record = json.loads(line)
            written_by, key = str(record[MODEL]), str(record[QUESTION])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            what = "not a file of answers"
            raise DataError(what, where=f"{file}:{number}", do="name another file: --out FILE") from error
        if written_by != mark:
            do = "name another file, or remove it"
            raise ConfigError("the answers are another model's", where=f"--out {file}", do=do)
        lines[key] = f"{line.decode()}\n"
    return lines


def read_questions(text: Path, limit: int, left_out: Counter[str]) -> dict[str, "Document"]:
    """The first conversations, without their last answers, by their hashes. Raises DataError: there is none."""
    from stages.text.chat import without_answer  # noqa: PLC0415 - slow, as are the others
    from stages.text.config import Source  # noqa: PLC0415
    from stages.text.sources import read_documents  # noqa: PLC0415

    questions: dict[str, Document] = {}
    for document in islice(read_documents(Source(kind="text", path=str(text), heldout_share=0.0)), limit):
        if not (messages := without_answer(document.messages)):
            left_out[NO_QUESTION] += 1
            continue
        question = replace(document, messages=messages)
        left_out[COPY] += question.digest.hex() in questions
        questions[question.digest.hex()] = question
    if not questions:
        raise DataError("no conversation with a question", where=str(text), do="records with messages")
    return questions
