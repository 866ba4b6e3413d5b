"""`python -m pipeline store averages`: averages beside the sums that a scan has in Redis."""

import argparse
from collections.abc import Sequence

from instruments.errors import exit_code, say
from stages.accumulators.config import StoreConfig


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the server fails, 2 the settings are wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline store",
        description="Write avg_act, avg_grad_norm and freq_act beside a scan's sums in Redis; again after it went on.",
    )
    parser.add_argument("command", choices=["averages"])
    parser.add_argument("--namespace", required=True, help="prefix of its keys; may be empty")
    parser.add_argument("--url", help="redis://host:6379/0; default: TINY_ONN_REDIS_URL in the environment")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _write_averages(wanted))


def _write_averages(wanted: argparse.Namespace) -> None:
    from stages.accumulators.redis_connection import connect  # noqa: PLC0415 - without torch

    client, place = connect(StoreConfig("redis", url=wanted.url))
    from stages.accumulators.redis_store import write_averages  # noqa: PLC0415 - loads torch

    with client:
        sums = write_averages(client, place, wanted.namespace)
    say(f"{len(sums.done)} batches, {sums.counters.get('tokens', 0):,.0f} tokens in {place}\n")
