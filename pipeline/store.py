"""`python -m pipeline store export|import|averages`: sums of a scan between Redis and files, averages beside them."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from instruments.errors import UserError, check_output, exit_code, say
from pipeline.disk import explain_os_error
from stages.accumulators.config import StoreConfig


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the server or a file fails, 2 the settings are wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline store", description="The sums of a scan in Redis: copies in files, and averages."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explanations = {
        "export": "write the sums of a namespace to FILE, for a scan with store=local to continue",
        "import": "add FILE to a namespace, for a scan with store=redis to continue; a repetition changes nothing",
        "averages": "write avg_act, avg_grad_norm and freq_act beside the sums; again after a scan that went on",
    }
    for name, explanation in explanations.items():
        command = commands.add_parser(name, help=explanation, description=explanation)
        if name != "averages":
            command.add_argument("file", type=Path, metavar="FILE", help="a .safetensors file")
        command.add_argument("--namespace", required=True, help="prefix of its keys; may be empty")
        command.add_argument("--url", help="redis://host:6379/0; default: TINY_ONN_REDIS_URL in the environment")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _copy(wanted))


def _copy(wanted: argparse.Namespace) -> None:
    name, file = wanted.command, vars(wanted).get("file", Path())
    if name == "export":
        check_output(file)
    from stages.accumulators.redis_connection import connect  # noqa: PLC0415 - without torch

    client, place = connect(StoreConfig("redis", url=wanted.url))
    # Loads torch.
    from stages.accumulators.redis_store import export_sums, import_sums, write_averages  # noqa: PLC0415

    try:
        with client:
            act = {"export": export_sums, "import": import_sums, "averages": write_averages}[name]
            sums = act(client, place, wanted.namespace, file)
    except (OSError, SafetensorError) as error:
        explained = explain_os_error(error, where=wanted.command, folder=file.absolute().parent, do="name another FILE")
        unread = UserError(f"the file cannot be read or written: {error}", where=str(file), do="name another FILE")
        raise explained or unread from error
    batches, tokens = len(sums.done), sums.counters.get("tokens", 0)
    say(f"{batches} batches, {tokens:,.0f} tokens in {file if name == 'export' else place}\n")
