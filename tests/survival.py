"""Effect of training on checkpoints: held-out loss and routing after AdamW steps, for a dense model and its MoEs."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from models.training import RouterWatch
from stages.text.config import DataConfig
from stages.text.sequences import Split, load_text

ROWS, LENGTH = 4, 128  # sequences of a training batch and their tokens


class Trained(NamedTuple):
    """Measurements of a model after some steps."""

    loss: float  # on held-out text
    kept: float  # share of (token, layer) pairs that keep all their experts; 1 for a dense model


def load_fp32(folder: Path | str) -> PreTrainedModel:
    """Load a checkpoint in fp32."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


def read_batches(tokenizer_of: Path | str, split: Split, count: int) -> list[Tensor]:
    """Read `count` batches of token numbers from the Python standard library."""
    tokens = 2 * count * ROWS * LENGTH
    settings = DataConfig(tokens=tokens, heldout_tokens=tokens, max_length=LENGTH)
    return batch_up(settings, tokenizer_of, split, count)


def read_text_batches(tokenizer_of: Path | str, path: Path, count: int, length: int = 32) -> list[Tensor]:
    """Read `count` batches of short sequences from a text file."""
    tokens = 2 * count * ROWS * length
    settings = DataConfig(kind="text", path=str(path), tokens=tokens, max_length=length)
    return batch_up(settings, tokenizer_of, "calibration", count)


def batch_up(settings: DataConfig, tokenizer_of: Path | str, split: Split, count: int) -> list[Tensor]:
    """Batch the sequences of full length."""
    sequences = load_text(settings, AutoTokenizer.from_pretrained(tokenizer_of), split).sequences
    rows = [sequence.ids for sequence in sequences if len(sequence.ids) == settings.max_length][: count * ROWS]
    assert len(rows) == count * ROWS, "not enough text"
    return list(torch.tensor(rows).split(ROWS))


def heldout_loss(model: PreTrainedModel, batches: Sequence[Tensor]) -> float:
    """Mean loss, in nats per token."""
    return measure(model, batches)[0]


@torch.no_grad()
def measure(
    model: PreTrainedModel, batches: Sequence[Tensor], autocast: torch.dtype | None = None
) -> tuple[float, Tensor | None]:
    """Mean loss in nats per token, and the (L, T, K) chosen experts, sorted; None for a dense model."""
    sparse = any("experts" in name for name, _ in model.named_parameters())
    watch, losses, chosen = RouterWatch(model) if sparse else None, [], []
    for ids in batches:
        with (
            watch.collect() if watch else nullcontext([]) as routings,
            torch.autocast("cpu", autocast, enabled=autocast is not None),
        ):
            losses.append(float(model(input_ids=ids, labels=ids).loss))
        chosen.append([routing.chosen_TK.sort(1).values for routing in routings])
    if watch:
        watch.remove()
    return sum(losses) / len(losses), torch.cat([*map(torch.stack, chosen)], 1) if sparse else None


def survive(
    model: PreTrainedModel, batches: Sequence[Tensor], heldout: Sequence[Tensor], *, rate: float, looks: Sequence[int]
) -> dict[int, Trained]:
    """Train one AdamW group of all parameters; return steps → measurements, with step 0 before training.

    Args:
        model: trained in place.
        batches: one per step, repeated if there are fewer batches than steps.
        heldout: batches for the measurements.
        rate: learning rate of AdamW.
        looks: steps after which to measure.
    """
    model.eval()  # no dropout, so the comparison is deterministic
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loss, first = measure(model, heldout)
    found = {0: Trained(loss, 1.0)}
    for number in range(1, max(looks) + 1):
        ids = batches[(number - 1) % len(batches)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in looks:
            loss, now = measure(model, heldout)
            kept = 1.0 if first is None or now is None else float((first == now).all(-1).float().mean())
            found[number] = Trained(loss, kept)
    return found


def excess(moe: dict[int, Trained], dense: dict[int, Trained], steps: int) -> float:
    """Rise of the MoE's loss minus the rise of the dense model's loss; a fall of the dense model's loss counts as 0."""
    return (moe[steps].loss - moe[0].loss) - max(0.0, dense[steps].loss - dense[0].loss)
