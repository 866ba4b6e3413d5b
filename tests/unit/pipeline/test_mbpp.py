"""MBPP as a command: code in answers, verdicts, resumed runs; three tasks on the embedded model."""

import errno
import json
import shutil
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from instruments.errors import ConfigError, DataError
from models.source import EMBEDDED
from pipeline import mbpp, sandbox
from pipeline.artifacts import hold_lock
from pipeline.mbpp import Answer, Task, extract_code, judge_answers, read_answers, read_tasks, render

FENCED = "def f(x):\n    return x\n"
TASKS = [
    {"task_id": 2, "text": "Not of the test part.", "code": "", "test_setup_code": "", "test_list": []},
    {
        "task_id": 11, "text": "Write a function to double the given number in an integer way.",
        "code": "def double(x):\r\n    return 2 * x", "test_setup_code": "",
        "test_list": ["assert double(3) == 6", "assert double(0) == 0"], "challenge_test_list": [],
    },
    {
        "task_id": 12, "text": "Write a class of nodes.", "code": "class Node: pass",
        "test_setup_code": "node = Node()", "test_list": ["assert isinstance(node, Node)"],
    },
    {
        "task_id": 510, "text": "Write add.", "code": "add = max", "test_setup_code": "",
        "test_list": ["assert add(1, 2)"],
    },
]  # fmt: skip

FIELDS = ("task_id", "text", "test_setup_code", "test_list")
MARKS = {task["task_id"]: Task(*map(task.get, FIELDS)).mark for task in TASKS}


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"```python\n{FENCED}```", FENCED),
        (f"```python\n{FENCED}```\nIt works:\n```python\nprint(f(1))\n```", FENCED),
        (f"```python\n{FENCED}", FENCED),
        ("```python\nf = lambda x: x\n```", "f = lambda x: x\n"),
        ("```python\nf(1)\n```", ""),
        (f"```python\n```python\n{FENCED}```", ""),
        ("```python\n", ""),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert extract_code(answer) == code


def test_only_the_test_part_is_read(tasks):
    assert [task.task_id for task in read_tasks(tasks)] == [11, 12, 510]
    assert read_tasks(tasks)[0].prompt.endswith("pass these tests:\nassert double(3) == 6\nassert double(0) == 0")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (2 * f"{json.dumps(TASKS[1])}\n", ""),
        (json.dumps(TASKS[1] | {"test_list": []}), ""),
        ("", ""),
        ("[]\n", ":1"),
        ('{"task_id": 11}\n', ":1"),
        (json.dumps(TASKS[1]) + "\n{\n", ":2"),
        ("\0\n", ":1"),
    ],
)
def test_files_that_are_not_mbpp(tmp_path, content, place):
    path = tmp_path / "mbpp.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_tasks(path)
    assert caught.value.where == f"{path}{place}"


def answer(text, task_id, verdict="", **fields):
    given = {"key": f"k-{MARKS.get(task_id)}", "model": "m", "tokens": 5, "ended": True, "seconds": 1.0, **fields}
    return Answer(**given, answer=text, task_id=task_id, verdict=verdict)


def test_right_answers_are_solved_and_no_others(tasks):
    try:
        sandbox.require_jail()
    except ConfigError as error:
        pytest.skip(str(error))
    given = [
        answer("```python\ndef double(x):\n    return x + x\n```", 11),
        answer("```python\ndef double(x):\n    return x ** 2\n```", 11),
        answer("```python\nclass Node:\n    '''one'''\n```", 12),
        answer("```python\nI do not know.", 12),
        answer("def add(a, b):\n    return a + b", 510),
        answer("def add(a, b):\n    return a + b", 510, "kept"),
        answer("def add(a, b):\n    return a + b", 9),
        answer("def add(a, b):\n    return a + b", 510, key="k-of another prompt"),
    ]
    judge_answers(given, read_tasks(tasks), tasks.with_name("answers.jsonl"))
    assert [answer.verdict for answer in given] == [
        "solved", "raised AssertionError", "solved", "no code", "solved", "kept", "", "",
    ]  # fmt: skip
    assert read_answers(tasks.with_name("answers.jsonl")) == given


def test_verdicts_are_kept_when_it_is_interrupted(tasks, monkeypatch):
    file, verdicts = tasks.with_name("answers.jsonl"), iter(["solved", "no end"])
    monkeypatch.setattr(mbpp, "judge", lambda *_: next(verdicts))
    with pytest.raises(StopIteration):
        judge_answers([answer("def right(): ...", 11) for _ in range(3)], read_tasks(tasks), file)
    assert [each.verdict for each in read_answers(file)] == ["solved", "no end", ""]


def test_a_full_disk_is_told(tasks, monkeypatch, capsys):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    write_as(monkeypatch, "def right(): ...", fail)
    assert run(tasks, EMBEDDED, "--out", tasks.with_name("answers.jsonl")) == 1
    assert "no room left on the disk" in capsys.readouterr().err


def test_the_table_counts_what_was_solved():
    rows = [answer("x", 11, "solved"), answer("def f(): pass", 12, "NameError", ended=False), answer("", 13, "no code")]
    cells = [cell.strip() for cell in render([*rows, answer("", 11, model="n")]).splitlines()[2].split("|")[1:-1]]
    assert cells == ["m", "1 of 3", "33.3% ± 20.0%", "1", "2", "15", "3.0 s"]


@pytest.mark.parametrize("content", ['{"mine": 1}\n', '{"mine": 1}', "a note", "[1,\n2]"])
def test_another_file_is_not_overwritten(tmp_path, tasks, capsys, content):
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    assert run(tasks, "--out", path, "--run-code") == 1
    assert path.read_text() == content
    assert f"where: {path}:1" in capsys.readouterr().err


def write_as(monkeypatch, text, during=lambda: None):
    """Let every checkpoint answer with `text`; `during` is called before each batch."""

    @contextmanager
    def open_writer(*_):
        writer = Mock(encode=lambda *_, **__: [1])
        answer = (text, 5, True)
        writer.write_all = lambda prompts, *_, **__: (
            (range(number, number + 1), during() or [answer]) for number, _ in enumerate(prompts)
        )
        yield writer

    monkeypatch.setattr("pipeline.greedy.open_writer", open_writer)
    monkeypatch.setattr(mbpp, "require_jail", lambda: None)
    monkeypatch.setattr(mbpp, "judge", lambda code, _: "solved" if "right" in code else "raised NameError")


def test_a_batch_is_kept_when_the_next_is_interrupted(tmp_path, tasks, monkeypatch):
    write_as(monkeypatch, "x\u2028y", Mock(side_effect=[None, KeyboardInterrupt]))
    assert run(tasks, EMBEDDED, "--out", tmp_path / "answers.jsonl") != 0
    assert [each.answer for each in read_answers(tmp_path / "answers.jsonl")] == ["```python\nx\u2028y"]


def test_answers_that_another_process_is_still_writing_are_left_alone(tmp_path, tasks, monkeypatch, capsys):
    out, codes = tmp_path / "answers.jsonl", []
    write_as(monkeypatch, "def right(): ...", lambda: codes.append(run(tasks, "--out", out, "--run-code")))
    assert run(tasks, EMBEDDED, "--out", out) == 0
    assert codes == [1, 1, 1]
    with hold_lock(out.with_name(f".{out.name}.lock"), task="writing"):
        assert run(tasks, "--out", out) == 0  # only shows them
    assert "another run is writing these answers" in capsys.readouterr().err
    assert len(read_answers(out)) == 3


def test_checkpoints_of_one_name_have_a_row_each(tmp_path, tasks, monkeypatch, capsys):
    out, latest = tmp_path / "answers.jsonl", tmp_path / "latest"
    earlier = [answer("def right(): ...", task, model=str(latest)) for task in (11, 12)]
    out.write_text("".join(json.dumps(vars(each)) + "\n" for each in earlier))
    for name, limit in (("right", 3), ("wrong", 1)):
        (shutil.copytree(EMBEDDED, tmp_path / name) / "generation_config.json").write_text(f'{{"name": "{name}"}}')
        latest.unlink(missing_ok=True)
        latest.symlink_to(name)
        write_as(monkeypatch, f"def {name}(): ...")
        assert run(tasks, latest, "--out", out, "--limit", limit) == 0
    capsys.readouterr()
    assert run(tasks, "--out", out, "--run-code") == 0
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if str(latest) in line]
    names, solved = zip(*([cell.strip() for cell in row] for row in rows), strict=True)
    assert solved == ("2 of 2", "3 of 3", "0 of 1")
    assert len({*names}) == 3


def run(tasks, *words):
    return mbpp.main([*map(str, words), "--tasks", str(tasks)])


def test_three_tasks_on_the_embedded_model(tmp_path, tasks, capsys, monkeypatch):
    out, shown = tmp_path / "answers.jsonl", []
    words = [EMBEDDED, "--out", out, "--tokens", 12, "--device", "cpu"]
    assert run(tasks, *words, "--limit", 2) == 0
    shown.append(capsys.readouterr().out)
    assert "| – of 2 " in shown[0]
    assert "--run-code" in shown[0]
    first = out.read_text()
    monkeypatch.setattr(mbpp, "judge", lambda *_: pytest.fail("it ran code without --run-code"))
    assert run(tasks, *words) == 0  # only the third task is left
    assert out.read_text().startswith(first)
    answers = read_answers(out)
    assert [len(answers), {answer.task_id for answer in answers}] == [3, {11, 12, 510}]
    assert all(0 < answer.tokens <= 12 for answer in answers)
    monkeypatch.undo()
    try:
        sandbox.require_jail()
    except ConfigError as error:
        pytest.skip(str(error))
    capsys.readouterr()
    monkeypatch.setattr("pipeline.greedy.open_writer", lambda *_: pytest.fail("nothing is left to write"))
    assert run(tasks, "--out", out, "--run-code") == 0
    assert "| 0 of 3 " in capsys.readouterr().out
    assert all(answer.verdict for answer in read_answers(out))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 2),
        (["/nowhere"], 1),
        (["--out", "/nowhere/x"], 2),
        ([str(EMBEDDED), "--device", "cuda:77"], 2),
        ([str(EMBEDDED), "--device", "meta"], 2),
    ],
)
def test_wrong_command_lines(tasks, tmp_path, words, code, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(tasks, *words) == code
    assert "  do:    " in capsys.readouterr().err


def test_a_later_answer_to_the_same_task_counts():
    assert "1 of 1" in render([answer("x", 11, "no code"), answer("y", 11, "solved")])
