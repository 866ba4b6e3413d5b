"""`python -m pipeline generate CHECKPOINT "prompt"`: what a checkpoint, dense or carved, writes after a prompt."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from instruments.errors import exit_code, say
from models.source import read_config


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 no checkpoint, 2 wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline generate", description="Print what a checkpoint writes after a prompt: greedy."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve or a dense model")
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message in the model's chat template")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="another checkpoint, whose text is printed first")
    add_limits(parser, tokens=100)
    wanted = parser.parse_args(words)

    def work() -> None:
        folders = [folder for folder in (wanted.dense, wanted.checkpoint) if folder]
        for folder in folders:
            read_config(folder)
        from pipeline.greedy import open_writer  # noqa: PLC0415 - slow, and the help page does not need it

        for folder in folders:
            with open_writer(folder, wanted.device) as writer:
                ids = writer.encode(wanted.prompt, chat=wanted.chat)
                ((said, *_),) = writer.write([ids], wanted.tokens)
            title = f"{folder}:\n" if wanted.dense else ""
            say(f"{title}{said if wanted.chat else wanted.prompt + said}\n")

    return exit_code(work)


def add_limits(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add these options, numbers from 1, and the device."""
    told = {"tokens": "most tokens", "limit": "only so many, from the first"}
    for name, default in defaults.items():
        said = f"{told[name]}; default {default}"
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=said)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...; default auto")


def count(word: str) -> int:
    """A number from 1 on a command line."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is no number from 1")
    return int(word)
