"""Passwords are used but never written."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from instruments.errors import UserError, redact
from pipeline.overrides import command_line
from pipeline.run_folder import RunFolder, logging_to
from pipeline.settings import Settings
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import connect

URL = "redis://me:s3sam@host:1/0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (URL, "redis://me@host:1/0"),
        ("redis://:s3sam@host", "redis://host"),
        ("redis://me:s3:s@m/x@host", "redis://me@host"),
        ("store.url='rediss://:s3sam@host/0' n=1 a@b", "store.url='rediss://host/0' n=1 a@b"),
        ("unix:///run/redis.sock?db=0&password=s3sam", "unix:///run/redis.sock?db=0&password="),
        ("HF_ENDPOINT=https://s3sam@mirror/x", "HF_ENDPOINT=https://mirror/x"),
        ("redis://me@host and https://site/@me", "redis://me@host and https://site/@me"),
        ("no address: me:s3@x", "no address: me:s3@x"),
    ],
)
def test_what_is_left_of_an_address(text, expected):
    assert redact(text) == expected


def test_words_and_remedies():
    assert "s3sam" not in command_line([f"store.url={URL}"], stage="score")
    assert "s3sam" not in str(UserError(URL, where=URL, do=URL))


@pytest.mark.parametrize("url", [URL, "redis://host:1/0?password=s3sam"])
def test_a_password_in_the_command_line_is_refused(url):
    with pytest.raises(UserError) as caught:
        connect(StoreConfig("redis", url=url))
    assert caught.value.where == "setting store.url"
    assert "TINY_ONN_REDIS_PASSWORD" in caught.value.do
    assert "s3sam" not in str(caught.value)


def fail():
    logging.getLogger("stages.scan").info("reading %s", URL)
    raise ValueError(URL)


def test_nothing_that_a_run_leaves(tmp_path, capsys):
    settings = Settings(experts=3, n=4, output_dir=str(tmp_path), store=StoreConfig("redis", url=URL))
    run = RunFolder(tmp_path / "run", settings, ["store=redis", f"store.url={URL}"])
    run.record_stage("scan", "ab" * 32)
    with pytest.raises(ValueError, match="s3sam"), logging_to(run.folder / "run.log"):
        fail()
    said = capsys.readouterr()
    written = "".join(path.read_text() for path in (tmp_path / "run").iterdir())
    assert "s3sam" not in written + said.out + said.err
    assert written.count("redis://me@host:1/0") >= 4


REDIS = ("store=redis", "store.url=redis://me:s3sam@127.0.0.1:1/0", "stage=scan")


def test_printed_settings():
    command = [sys.executable, "-m", "pipeline", "--cfg", "job", *REDIS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert "url: redis://me@127.0.0.1:1/0" in done.stdout
    assert "s3sam" not in done.stdout + done.stderr
