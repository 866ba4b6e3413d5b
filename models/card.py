"""The model card: source model, shape and methods of the carve, and the runtimes that suit it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import MoEShape
from models.decoder import Decoder
from models.targets.base import (
    BLOCK,
    RUNTIMES,
    MoETarget,
    expert_width,
    gate_kind,
    is_power_of_two,
    long_texts,
    shared_width,
)
from models.targets.config_json import emit_text_config

# owner/name on the hub; any other source is a folder.
_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
# Classes that load a carve and its input: of text, and of text with images.
_READING, _SEEING = ("AutoModelForCausalLM", "AutoTokenizer"), ("AutoModelForImageTextToText", "AutoProcessor")
NO_TRAINING = "none: stage=train has not run"
_TRAINING = "| training | {} |"


def copy_card(source: Path, folder: Path, training: str) -> None:
    """Copy the card of the checkpoint in `source` to `folder`, with `training` as the description of its training."""
    card = (source / "README.md").read_text(encoding="utf-8")
    card = card.replace(_TRAINING.format(NO_TRAINING), _TRAINING.format(training))
    (folder / "README.md").write_text(card, encoding="utf-8")


def render_card(
    source: str,
    target: MoETarget,
    shape: MoEShape,
    rows: Mapping[str, object],
    dense: Decoder,
    pad_to: int | None = None,
    *,
    tied: bool = False,
) -> str:
    """The card as Markdown, with the front matter that hubs read.

    Args:
        source: the dense model's repository or folder; of a folder's path only the last part is shown.
        target: the architecture.
        shape: shape of the experts.
        rows: what was done by which method, with its results.
        dense: the dense model.
        pad_to: see `expert_width`.
        tied: input and output embedding are one tensor on disk.
    """
    # Without characters of markup.
    name = re.sub(r"[^\w .+/-]", "_", source if _REPOSITORY.fullmatch(source) else Path(source).name).strip() or "dense"
    width, layers = dense.width, dense.depth
    share = f"{shape.active_width / width:.0%}"
    if shape.dense_layers:
        share += f"; on average over all layers {shape.active_share(width, layers, dense.lacking):.0%}"
    remote_code = ", trust_remote_code=True" if target.is_tiny_onn else ""
    seeing = dense.is_wrapper and not target.is_tiny_onn
    model_class, reader_class = _SEEING if seeing else _READING
    architecture = target.wrappers[str(dense.config_json["model_type"])][0] if seeing else target.architecture
    config = emit_text_config(dense, target, shape, pad_to, tied=tied)
    lines = suitable_runtimes(target, shape, pad_to, dense.config, config, seeing=seeing)
    runtimes = "\n".join(f"- {line}" for line in lines)
    facts = {
        "architecture": f"`{architecture}`",
        "experts": _experts(shape, layers),
        "always-on neurons": shape.always_on,
        "active FFN width": f"{shape.active_width} of the dense model's {width} ({share})",
        **rows,
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: {"image-text-to-text" if seeing else "text-generation"}
tags: [moe, tiny-onn]
base_model: {json.dumps(name)}
---
# {name}, carved into experts

A Mixture-of-Experts cut out of the dense model `{name}` with Tiny-ONN.

| | |
|---|---|
{table}
{_TRAINING.format(NO_TRAINING)}

```python
from transformers import {model_class}, {reader_class}

model = {model_class}.from_pretrained("path/of/this/folder"{remote_code})
{reader_class.removeprefix("Auto").lower()} = {reader_class}.from_pretrained("path/of/this/folder"{remote_code})
```

## Where this shape runs

{runtimes}
"""


def _experts(shape: MoEShape, layers: int) -> str:
    if shape.pooled:
        return (
            f"{shape.experts} of {shape.n} neurons in all, one pool shared by {layers} layers; each layer's "
            f"router sends a token to {shape.top_k}"
        )
    kept = f"; layers {', '.join(map(str, shape.dense_layers))} stay dense" if shape.dense_layers else ""
    return (
        f"{shape.experts} of {shape.n} neurons in each of {layers - len(shape.dense_layers)} layers, "
        f"{shape.top_k} per token{kept}"
    )


def suitable_runtimes(
    target: MoETarget,
    shape: MoEShape,
    pad_to: int | None,
    dense: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    seeing: bool = False,
) -> list[str]:
    """Advice in lines of text: which runtimes load this target, and how well their kernels suit its E and N.

    `dense` is the text part of the dense model's configuration, `config` that of the carve's.
    """
    width, shared = expert_width(shape, pad_to), shared_width(target, shape, pad_to)
    served = target.served_by(config)
    lines = [_loading(target, seeing=seeing), *filter(None, [long_texts(target, dense)])]
    if shape.top_k == 1 < shape.experts and gate_kind(target, shape) == "softmax_of_chosen":
        lines.append(
            "Training: the gate of one chosen expert is always 1; routers learn from the load balancing loss alone."
        )
    if width != shape.n:
        why = f"a multiple of {pad_to or (8 if width % BLOCK else BLOCK)}"
        lines.append(f"Experts are padded with zero neurons to {width}, {why}; the output is the same.")
    if shared > shape.always_on:
        lines.append(f"{shape.always_on} always-on neurons are padded with zero neurons to {shared}.")
    if "vLLM" in served:
        lines.append(f"{', '.join(name for name in served if name != 'llama.cpp')}: {_fused_kernels(shape, width)}")
    if "llama.cpp" in served:
        head = " and adds the output embedding, without which llama.cpp does not load it"
        head *= bool(config.get("tie_word_embeddings")) and "llama.cpp" in target.needs_head
        lines.append(f"llama.cpp: `python -m pipeline gguf` converts it{head}; {_blocks(width)}")
        lines.append("llama.cpp, with less GPU memory than weights: `-ot exps=CPU` keeps the experts in RAM.")
    if not target.is_tiny_onn:
        lines.append(_nf4(target))
    lines += [f"{name}: {fault}." for name, fault in target.faults(config).items()]
    if absent := [name for name in RUNTIMES if name not in target.runtimes]:
        lines.append(f"{', '.join(absent)}: {'do' if len(absent) > 1 else 'does'} not know this architecture.")
    return [*lines, target.runtime_note] if target.runtime_note else lines


_OWN_CLASS = (
    "transformers 4.57 and 5: needs `trust_remote_code=True` (the code is in this folder), or Tiny-ONN installed and "
    "`import models.tiny_onn.register`."
)
_KNOWN_CLASS = (
    "transformers 4.57 and 5: loads without remote code; with 5, train with `experts_implementation={}`, an argument "
    "that 4.57 does not have."
)

_NEW_CLASS = "transformers 5: loads without remote code; train with `experts_implementation={}`. Not tested with 4.57."


def _loading(target: MoETarget, *, seeing: bool) -> str:
    """How transformers loads this target."""
    if target.is_tiny_onn:
        return _OWN_CLASS
    kernels = '{"text_config": "grouped_mm"}' if seeing else '"grouped_mm"'
    # 4.57 is tested without images.
    return (_KNOWN_CLASS if target.transformers_4 and not seeing else _NEW_CLASS).format(kernels)


def _blocks(width: int) -> str:
    if width % BLOCK:
        return (
            f"quantised formats want N % {BLOCK} == 0, N is {width}: down projections of experts stay in 16 bits, and "
            f"are slow (`assemble.pad_to={BLOCK}`)."
        )
    if width % 256:
        return f"N = {width} suits Q8_0 and Q4_0; K-quants want N % 256 == 0 (`assemble.pad_to=256`)."
    return f"N = {width} suits Q8_0, Q4_0 and the K-quants."


def _nf4(target: MoETarget) -> str:
    """Settings for bitsandbytes, which must skip routers (they choose by small differences) and one-row matrices."""
    # transformers 5 skips all names that end so: "proj", Gemma 4's router, would skip every projection.
    router = target.router.split(".")[-2] if target.transformers_4 else target.router_module
    modules = [router, *([target.shared_router.split(".")[-2]] if target.shared_router else [])]
    names = ", ".join(f'"{name}"' for name in [*modules, "lm_head"])
    return (
        f"bitsandbytes: `BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=[{names}])`; transformers 5 keeps "
        "experts as one tensor, which it leaves unquantised."
    )


def _fused_kernels(shape: MoEShape, width: int) -> str:
    if is_power_of_two(shape.experts) and width % 128 == 0:
        return "expert count and width suit the fused kernels."
    # For another number of experts, padding alone would only make the checkpoint larger.
    wanted = " (`assemble.pad_to=128` gives that)" if is_power_of_two(shape.experts) else ""
    slow = f"E = {shape.experts}, N = {width} take a slower path"
    return f"{slow}; the fast one needs E a power of two and N % 128 == 0{wanted}."
