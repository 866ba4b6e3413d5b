"""Run in a fresh process: compare carved checkpoints with their dense models, with transformers alone.

    python comparison.py < cases > findings

A line of the input is {dense, carved}, two folders; a line of the output is what `compare` finds, or {error}.
"""

import json
import math
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from images import NoImageError, image_inputs
from next_month import register
from torch import Tensor, nn
from transformers import PreTrainedModel

PATIENCE = 120  # seconds a case
SHORT, LONG = (40, 23), 100  # lengths of a padded batch, and of a sequence longer than the windows of attention
PROMPT, NEW = 40, 12
EXPERTS = 4
MODALITIES = ("vision", "visual", "image", "audio")  # words in the names of what a carve must only copy


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, interrupt)
    register()
    output, sys.stdout = sys.stdout, sys.stderr  # some models print
    for line in sys.stdin:
        signal.alarm(PATIENCE)
        try:
            found = compare(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - one broken checkpoint must not hide the others
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = {"error": f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"}
        signal.alarm(0)
        output.write(json.dumps(found) + "\n")
        output.flush()


def interrupt(*_: object) -> None:
    raise TimeoutError(f"more than {PATIENCE} s")


@torch.no_grad()
def compare(dense: str, carved: str) -> dict[str, Any]:
    """Largest differences of logits in standard deviations of the dense model's, on tokens that are not padding."""
    whole, gaps = load(dense)
    assert not any(gaps.values()), f"the dense model does not load: {gaps}"
    moe, loading = load(carved)
    whole_texts = texts(whole)
    wanted = [logits(whole, text) for text in whole_texts]
    found = {
        "class": type(moe).__name__,
        "loading": {key: sorted(map(str, value))[:5] for key, value in loading.items() if value},
        "difference": max(apart(logits(moe, text), want) for text, want in zip(whole_texts, wanted, strict=True)),
        "std": float(wanted[0].std()),
        "generated": generate_both(whole, moe, {"input_ids": draw_ids(whole, 1, PROMPT)}),
        "copied": copied(whole, moe),
    }
    found |= compare_images(whole, moe)
    experts = experts_of(moe, whole)
    found["layers"] = len({re.search(r"\.\d+\.|$", name).group() for name in experts})
    zero(experts.values())
    found["without_experts"] = apart(logits(moe, whole_texts[0]), wanted[0])
    found["noise"] = apart(logits(add_noise(whole), whole_texts[0]), wanted[0])
    return found


def load(folder: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a folder, of its own class in fp32, and what did not fit while loading."""
    config = json.loads((Path(folder) / "config.json").read_text())
    own = config.get("auto_map", {})
    name = next((name for name in own if name.startswith("AutoModelFor")), None) or config["architectures"][0]
    known = getattr(transformers, name, transformers.AutoModelForCausalLM)
    model, info = known.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=bool(own)
    )
    return model.eval(), info


def texts(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """A long sequence, and a batch with padding on the right."""
    ids = draw_ids(model, 1, LONG)
    batch = draw_ids(model, len(SHORT), max(SHORT))
    mask = (torch.arange(max(SHORT)) < torch.tensor(SHORT)[:, None]).long()
    return [{"input_ids": ids}, {"input_ids": batch * mask, "attention_mask": mask}]


def draw_ids(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Random tokens without the special ones at both ends of the vocabulary."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(64, size - 64, (rows, length), generator=torch.Generator().manual_seed(length))


def logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Logits of all tokens that are not padding, (tokens, V)."""
    found: Tensor = model(**batch, use_cache=False).logits
    mask = batch.get("attention_mask")
    return found.flatten(0, 1) if mask is None else found[mask.bool()]


def apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference in standard deviations, without logits that are masked; infinite if one is not finite."""
    possible = wanted > -1e9
    difference = float((found[possible] - wanted[possible]).abs().max() / wanted[possible].std())
    return difference if math.isfinite(difference) else math.inf


def generate_both(whole: PreTrainedModel, moe: PreTrainedModel, batch: dict[str, Tensor]) -> float | str:
    """The difference while generating with a cache, infinite for other tokens; or why the dense model cannot."""
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    try:
        wanted = whole.generate(**batch, **how)
    except Exception as error:  # noqa: BLE001 - a finding about transformers, not about the carve
        return f"the dense model cannot generate: {type(error).__name__}: {str(error)[:100]}"
    found = moe.generate(**batch, **how)
    same = torch.equal(found.sequences, wanted.sequences)
    return apart(torch.cat(found.logits), torch.cat(wanted.logits)) if same else math.inf


def compare_images(whole: PreTrainedModel, moe: PreTrainedModel) -> dict[str, Any]:
    """The difference with an image, and how much the image changes the dense model's logits."""
    try:
        batch = image_inputs(whole)
    except NoImageError as why:
        return {"image": str(why)} if str(why) else {}
    wanted = logits(whole, batch)
    other = {**batch, "pixel_values": -batch["pixel_values"]}
    return {
        "image": apart(logits(moe, batch), wanted),
        "image_matters": apart(logits(whole, other), wanted),
        "image_generated": generate_both(whole, moe, batch),
    }


def copied(whole: PreTrainedModel, moe: PreTrainedModel) -> tuple[int, int]:
    """How many tensors for images and sounds the carve has unchanged, and how many there are."""
    given = {name: value for name, value in whole.state_dict().items() if any(word in name for word in MODALITIES)}
    kept = moe.state_dict()
    return sum(name in kept and torch.equal(kept[name], value) for name, value in given.items()), len(given)


def add_noise(model: PreTrainedModel) -> PreTrainedModel:
    """Change the last bits of all weights: how far the logits move is what fp32 can tell apart."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1 + 2**-25 * torch.randn(parameter.shape, generator=generator))
    return model


def experts_of(moe: PreTrainedModel, whole: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters of the carve's experts, without those that the dense model has, too."""
    given = {name: parameter.shape for name, parameter in whole.named_parameters()}
    return {
        name: parameter
        for name, parameter in moe.named_parameters()
        if given.get(name) != parameter.shape
        and ((parameter.ndim == 3 and len(parameter) == EXPERTS) or ("experts." in name and "shared" not in name))
    }


def zero(parameters: Iterable[nn.Parameter]) -> None:
    """Switch experts off: a carve whose experts do nothing would pass every other comparison."""
    for parameter in parameters:
        parameter.zero_()


if __name__ == "__main__":
    main()
