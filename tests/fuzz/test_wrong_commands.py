"""Random wrong command lines are refused before anything is written, or planned."""

import shlex
from functools import partial
from random import Random

import jaxtyping
import pytest
from fuzz.mutants import Trials

import models.source
import pipeline.cli
from pipeline.check import validate
from pipeline.cli import start
from pipeline.help import groups
from pipeline.overrides import FIELDS
from pipeline.plan import make_plan
from pipeline.settings import STAGES

COUNTS = [pytest.param(20, id="quick"), pytest.param(400, id="long", marks=pytest.mark.slow)]
VALUES = (
    "", "null", "true", "false", "nan", "inf", "-inf", "-1", "0", "1", "2", "0.5", "1e308", "1e-308", "1e99", "-0.0",
    "9223372036854775808", "123456789012345678901234", "2147483648", "[]", "[[]]", "[nan]", "[0]", "[-1]", "[1,1]",
    "[null]", "[a,b]", "{}", "{a: 1}", "x", ".", "..", "../x", "/", "/dev/null", "/dev/zero", "/proc/self/mem",
    "a b", "a=b", "a!b", "a(b", "'a", '"a', "a\nb", "a\tb", "\x1b[31m", "é", "\u202e",
    "${seed}", "${nope}", "${oc.env:HOME}", "???", "~", "*", "a,b", "[", "]", "\\", "\\x", "\\u0000", "\udcff",
    "0x10", "1_000", "1,000", "[[0]]", "[{a: 1}]", "{a: [1]}", "['???']", "x" * 300, f"[{'x' * 300}]", "/x" * 2500,
)  # fmt: skip
# These settings would open a network connection.
ELSEWHERE = ("store.url", "store.host")


def make_words(random):
    """A stage and one to three settings or groups with random values, in random order."""
    keys = [key for key in [*FIELDS, *groups()] if key not in ELSEWHERE]
    words = [f"stage={random.choice([*STAGES, 'all'])}"]
    for _ in range(random.randint(1, 3)):
        key = random.choice(keys)
        kind = random.randrange(12)
        if kind == 0:
            key = key[: random.randrange(len(key)) + 1]
        elif kind == 1:
            key = random.choice("+~.=") + key
        elif kind == 2:
            key = f"{key}.{random.choice(keys)}"
        options = groups().get(key)
        value = random.choice(options) if options and random.random() < 0.5 else random.choice(VALUES)
        words.append(f"{key}={value}" if random.random() < 0.95 else random.choice([key, value, "="]))
    random.shuffle(words)
    return words


@pytest.fixture
def unchecked():
    """Disable the run-time type checks, which only tests have: validation has to find wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("count", COUNTS)
def test_wrong_command_lines(tmp_path, monkeypatch, count, caplog):
    random, trials, place = Random(10), Trials(), tmp_path / "inner"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(models.source, "hub_answers", lambda: False)
    monkeypatch.setattr(
        pipeline.cli, "run_pipeline", lambda settings, _folder, words: make_plan(validate(settings, words))
    )
    kept = {}
    for _ in range(count):
        words = [*make_words(random), "output_dir=outputs"]
        before = sum(trials.failures.values())
        trials.run(partial(start, words))
        if sum(trials.failures.values()) > before:
            kept[shlex.join(words)[:300]] = None
        caplog.clear()
        assert [path.name for path in tmp_path.iterdir()] == ["inner"], words
        assert {path.name for path in place.iterdir()} <= {"outputs"}, words
    assert not +trials.failures, f"{trials}\n" + "\n".join(kept)
