"""Which dense models can be carved: a tiny random checkpoint of every type in transformers, all experts on.

PYTHONPATH=.:tests python -m zoo                          # every type: minutes of one core
PYTHONPATH=.:tests python -m zoo llama gemma3_image       # some
PYTHONPATH=.:tests python -m zoo --only refused failed    # rows of these outcomes, and the count of all

A name that ends in `_image` is the image-text model; `layers` is the number of layers with experts. Differences are in
standard deviations of the dense model's logits: of tokens that are not padding, while generating with a cache, and with
an image. `noise` is the difference that the last bit of the weights makes.
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from integration.carving import similar_lines
from zoo.carves import OUTCOMES, Finding, Zoo
from zoo.checkpoints import names_of_types

COLUMNS = (
    "type",
    "class",
    "outcome",
    "target",
    "layers",
    "difference",
    "generating",
    "with image",
    "noise",
    "s",
    "notes",
)


def write_text(path: Path) -> Path:
    """Similar but different paragraphs."""
    path.write_text("\n\n".join(similar_lines(400)))
    return path


def row(found: Finding) -> list[str]:
    """The cells of a type."""
    figures, notes = [], [found.reason]
    for key in ("difference", "generated", "image", "noise"):
        value = found.measured.get(key, "")
        figures.append(f"{value:.1e}" if isinstance(value, float) else "")
        notes.append("" if isinstance(value, float) else value)
    seconds = f"{found.seconds:.1f}"
    carved = [found.outcome, found.target, str(found.measured.get("layers", ""))]
    return [found.name, found.dense, *carved, *figures, seconds, "; ".join(filter(None, notes))]


def show(cells: Iterable[str]) -> None:
    """Print a row of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--only", nargs="*", choices=OUTCOMES, default=OUTCOMES, help="show the rows of these outcomes")
    parser.add_argument("--folder", type=Path, help="keep checkpoints, carves and logs here")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, such as assemble.target=tiny_onn")
    wanted = parser.parse_args()
    counts: Counter[str] = Counter()
    show(COLUMNS)
    show("-" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = wanted.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        zoo = Zoo(folder.resolve(), write_text(folder / "text.txt"), tuple(wanted.set))
        for name in wanted.types or names_of_types():
            found = zoo.examine(name)
            counts[found.outcome] += 1
            if found.outcome in wanted.only:
                show(row(found))
        zoo.close()
    print("\n" + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]))  # noqa: T201


if __name__ == "__main__":
    main()
