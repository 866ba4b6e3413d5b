"""`python -m pipeline store`: copies the sums of a scan between Redis and files."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from instruments.errors import ConfigError, UserError, exit_code, say
from pipeline.disk import explain_os_error
from stages.accumulators.config import StoreConfig


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the server or a file fails, 2 the settings are wrong, 130 interrupted."""
    wanted = _parser().parse_args(words)
    return exit_code(lambda: say(_run(wanted)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline store", description="Copy the sums of a scan between Redis and files."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explanations = {
        "export": "write the sums of a namespace to FILE, for a scan with store=local to continue",
        "import": "add FILE to a namespace, for a scan with store=redis to continue",
        "drop": "delete a namespace",
    }
    for name, explanation in explanations.items():
        command = commands.add_parser(name, help=explanation, description=explanation)
        if name != "drop":
            command.add_argument("file", type=Path, help="a .safetensors file")
        command.add_argument("--namespace", required=True, help="prefix of its keys; may be empty")
        command.add_argument("--url", help="redis://host:6379/0; default: TINY_ONN_REDIS_URL in the environment")
    return parser


def _run(wanted: argparse.Namespace) -> str:
    """Run the command; returns the text to print."""
    if wanted.command == "export" and not wanted.file.absolute().parent.is_dir():
        what = f"there is no folder {wanted.file.absolute().parent}"
        raise ConfigError(what, where="command line", do="a FILE in a folder that exists")
    from stages.accumulators.redis_connection import connect  # noqa: PLC0415 - without torch

    client, place = connect(StoreConfig("redis", url=wanted.url))
    # The rest loads torch.
    from stages.accumulators.redis_transfer import export_sums, find_scan, import_sums  # noqa: PLC0415

    with client:
        if wanted.command == "import":
            sums = import_sums(client, place, wanted.namespace, wanted.file)
            return f"{len(sums.done)} batches, {sums.counters.get('tokens', 0):,.0f} tokens in {place}\n"
        store = find_scan(client, place, wanted.namespace)
        if wanted.command == "drop":
            return f"{store.clear()} batches deleted\n"
        try:
            sums = export_sums(store, wanted.file)
        except (OSError, SafetensorError) as error:
            folder, do = wanted.file.absolute().parent, "name another FILE"
            explained = explain_os_error(error, where="export", folder=folder, do=do)
            what = f"the file cannot be written: {error}"
            raise explained or UserError(what, where=str(wanted.file), do=do) from error
    return f"{len(sums.done)} batches, {sums.counters.get('tokens', 0):,.0f} tokens in {wanted.file}\n"
