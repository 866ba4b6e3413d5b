"""Two tensor dumps compared, in a page of text."""

import math
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from models.dump.comparison import Difference, compare, pair
from models.dump.reader import DumpReader
from models.errors import ConfigError

COLUMNS = ("module", "tensor", "step", "relative L2", "largest", "cosine")
_WORST = 10


def compare_folders(first: Path, second: Path, tolerance: float) -> tuple[bool, str]:
    """Whether no tensor is farther apart than `tolerance`; and in words, the first that is and the worst ones.

    Raises:
        ConfigError: the dumps have no tensor in common.
    """
    with DumpReader(first) as ours, DumpReader(second) as theirs:
        pairs = pair(ours, theirs)
        if not pairs.pairs:
            raise ConfigError(
                "the two dumps have no tensor in common",
                where=f"{first}, {second}",
                do="dump the same modules and steps of the same model twice",
            )
        bar = tqdm(compare(ours, theirs, pairs), total=len(pairs.pairs), desc="compare", leave=False, disable=None)
        differences = [found for found in bar if found.beyond(tolerance)]
    head = f"{len(pairs.pairs):,} tensors compared, {len(differences):,} differ"
    head += f" by more than {tolerance:g}\n" if tolerance else "\n"
    alone = f"only in {first}: {pairs.only_first:,}; only in {second}: {pairs.only_second:,}\n"
    head += alone * bool(pairs.only_first or pairs.only_second)
    return not differences, head + (_describe(differences) if differences else "")


def _describe(differences: Sequence[Difference]) -> str:
    worst = sorted(differences, key=_badness, reverse=True)[:_WORST]
    return (
        f"\nfirst divergence, in the order of capture\n{_table(differences[:1])}\n"
        f"\nlargest relative distances\n{_table(worst)}\n"
    )


def _badness(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative_l2) else difference.relative_l2


def _table(differences: Sequence[Difference]) -> str:
    rows = [
        (
            found.record.source.module, found.record.source.tensor, str(found.record.source.step),
            f"{found.relative_l2:.3g}", f"{found.max_abs:.3g}", f"{found.cosine:.9f}",
        )
        for found in differences
    ]  # fmt: skip
    return tabulate(rows, COLUMNS, disable_numparse=True)
