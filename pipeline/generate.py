"""`python -m pipeline generate CHECKPOINT "prompt"`: what a checkpoint, dense or carved, writes after a prompt."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from instruments.errors import ConfigError, exit_code, say
from pipeline.clients import require_config


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 no checkpoint, 2 wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline generate", description="Print what a checkpoint writes after a prompt: greedy."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a carve or a dense model")
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message in the model's chat template")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="another checkpoint, whose text is printed first")
    parser.add_argument("--tokens", type=int, default=100, help="most new tokens (default 100)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default auto)")
    wanted = parser.parse_args(words)

    def work() -> None:
        if wanted.tokens < 1:
            raise ConfigError("--tokens must be at least 1", where="command line", do="--tokens 100")
        folders = [folder for folder in (wanted.dense, wanted.checkpoint) if folder]
        for folder in folders:
            require_config(folder)
        from pipeline.greedy import open_writer  # noqa: PLC0415 - slow, and the help page does not need it

        for folder in folders:
            with open_writer(folder, wanted.device) as writer:
                (said,) = writer.write([writer.encode(wanted.prompt, chat=wanted.chat)], wanted.tokens)
            title = f"{folder}:\n" if wanted.dense else ""
            say(f"{title}{said.text if wanted.chat else wanted.prompt + said.text}\n")

    return exit_code(work)
