"""Carves a real model as in the rows of stages/README, "A real model", and measures its loss on every text.

PYTHONPATH=.:tests python -m studies.real_model half MODEL [--gradients] [--healed [--rates 0.25]]
--instructions chats.jsonl --general web.jsonl --heldout wikitext2-valid.txt other_chats.jsonl code.jsonl

Qwen2.5-Coder-0.5B: half takes 16 minutes of two cores with AMX or 80 seconds of an H200; --gradients ten minutes more
of such cores, --healed half an hour of them or a minute of an H200. The code of the mixture is Python's standard
library.
"""

import argparse
from pathlib import Path

from omegaconf import OmegaConf

from pipeline.api import evaluate
from pipeline.help import CONF

# Row → dials, tokens, descent steps, and shares of instructions, general text and code.
ROWS = {
    "three_quarters": ({"experts": 80, "n": 32, "top_k": 38, "always_on": 2304}, 81_920, 128, (0.45, 0.35, 0.2)),
    "half": ({"experts": 116, "n": 32, "top_k": 32, "always_on": 1152}, 81_920, 128, (0.45, 0.35, 0.2)),
    "half_without_code": ({"experts": 116, "n": 32, "top_k": 32, "always_on": 1152}, 65_536, 128, (0.6, 0.4, 0.0)),
    "mask": ({"experts": 2, "n": 32, "top_k": 2, "always_on": 2112}, 81_920, 128, (0.45, 0.35, 0.2)),
    "mask_of_three_quarters": ({"experts": 2, "n": 32, "top_k": 2, "always_on": 3456}, 81_920, 128, (0.45, 0.35, 0.2)),
    "quarter": ({"experts": 71, "n": 64, "top_k": 9, "always_on": 320}, 81_920, 128, (0.45, 0.35, 0.2)),
    "quarter_without_code": ({"experts": 71, "n": 64, "top_k": 9, "always_on": 320}, 32_768, 160, (0.5, 0.5, 0.0)),
}
PRESET = OmegaConf.load(CONF / "train" / "heal.yaml")
HEALING = {"train.tokens": 200_000, "train.precision": "bfloat16", "evaluate.checkpoint": "train"}


def row_settings(row, instructions, general, *, gradients=False):
    """The dials and settings of a row, with or without gradient projection."""
    dials, tokens, steps, shares = ROWS[row]
    places = ({"path": instructions}, {"path": general}, {"python_stdlib": True})
    return {
        **dials,
        "dense_layers": [0, -1],
        "data.sources": [{**place, "share": share} for place, share in zip(places, shares, strict=True) if share],
        "data.tokens": tokens,
        "data.sample_tokens": 12_288,
        "data.max_length": 512,
        "data.heldout_tokens": 4096,
        "data.heldout_share": 0.0,
        "cluster.map": "none",
        "project.descent_steps": steps,  # the others are those of project=real_model, a folder's default
        "project.gradient_projection": gradients,
        "evaluate.baselines": [],
        "evaluate.speed_tokens": 0,
    }


def measure(model, settings, heldout, **groups):
    """Carve what is missing, and print the loss gap on each held-out text."""
    for path in heldout:
        found = evaluate(model, data="mixture", settings={**settings, "data.heldout_path": path}, **groups)
        print(f"{Path(path).name:40}{found.figures['this MoE']['loss gap (nats)']:+.4f}")  # noqa: T201


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("model", help="folder of the dense model")
    parser.add_argument("--instructions", required=True, help="jsonl with messages")
    parser.add_argument("--general", required=True, help="jsonl with text: web, encyclopedia")
    parser.add_argument("--heldout", nargs="+", required=True, help="texts to measure")
    parser.add_argument("--gradients", action="store_true", help="with gradient projection")
    parser.add_argument("--healed", action="store_true", help="train the carve on 200,000 tokens")
    parser.add_argument("--rates", type=float, default=1.0, metavar="X", help="times the learning rates of train=heal")
    wanted = parser.parse_args()
    settings = row_settings(wanted.row, wanted.instructions, wanted.general, gradients=wanted.gradients)
    groups = {"train": "heal"} if wanted.healed else {}
    rates = {f"train.{name}": wanted.rates * rate for name, rate in PRESET.items() if name.endswith("_rate")}
    healing = {**HEALING, **rates} if wanted.healed else {}
    measure(wanted.model, {**settings, **healing}, wanted.heldout, **groups)


if __name__ == "__main__":
    main()
