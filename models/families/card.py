"""The model card: what was carved from what, and where it runs."""

from dataclasses import dataclass
from pathlib import Path

from models.families.fold import gate_fold, is_power_of_two
from models.families.moe import AlwaysOn, MoETarget
from models.families.width import expert_width
from models.shape import Shape


@dataclass(frozen=True)
class CarveFacts:
    """What a card says."""

    source: str
    target: MoETarget
    shape: Shape
    width: int  # F of the dense FFN
    layers: int
    dropped: int  # units in no expert, all layers together
    most_copies: int  # highest multiplicity of a unit
    partition: str  # how units were grouped
    router: str
    projection: str  # what stage=project did, or that it has not run


def write_card(folder: Path, facts: CarveFacts) -> None:
    """Write `folder/README.md`."""
    (folder / "README.md").write_text(render_card(facts), encoding="utf-8")


def render_card(facts: CarveFacts) -> str:
    """The card as Markdown with the front matter hubs read."""
    shape = facts.shape
    runtimes = "\n".join(f"- {line}" for line in suitable_runtimes(facts.target, shape))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [moe, tiny-onn]
base_model: {facts.source}
---
# {facts.source}, carved into experts

A Mixture-of-Experts cut out of the dense model `{facts.source}` with Tiny-ONN: no weights were trained.

| | |
|---|---|
| architecture | `{facts.target.architecture}` |
| experts | {shape.experts} of {shape.n} neurons in each of {facts.layers} layers, {shape.top_k} per token |
| always-on neurons | {shape.always_on} |
| active FFN width | {shape.active_width} of the dense model's {facts.width} ({shape.active_width / facts.width:.0%}) |
| neurons left out | {facts.dropped} in all layers together |
| most copies of one neuron | {facts.most_copies} |
| partition | {facts.partition} |
| router | {facts.router} |
| projection | {facts.projection} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/of/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
```

## Where this shape runs

{runtimes}
"""


def suitable_runtimes(target: MoETarget, shape: Shape) -> list[str]:
    """What is known about the kernels of each runtime and this E, N and target."""
    lines = ['transformers 4.57 and 5: loads without remote code; train with `experts_implementation="grouped_mm"`.']
    if (width := expert_width(shape)) != shape.n:
        lines.append(
            f"Experts are padded with zero units to {width}, which grouped kernels want; the output is the same."
        )
    if is_power_of_two(shape.experts) and shape.n % 128 == 0:
        lines.append("vLLM, SGLang: expert count and width suit the fused kernels.")
    else:
        lines.append(
            f"vLLM, SGLang: E = {shape.experts}, N = {shape.n} take a slower path; fast are E a power of two and "
            "N % 128 == 0."
        )
    lines.append(_llama_cpp(target, shape))
    return lines


def _llama_cpp(target: MoETarget, shape: Shape) -> str:
    fold = gate_fold(target, shape)
    if target.always_on is AlwaysOn.SIGMOID_GATED and fold.norm_topk_prob:
        return "llama.cpp: does not renormalise this architecture's gates; choose E a power of two for it."
    if shape.n % 256:
        return f"llama.cpp: K-quants want N % 256 == 0, N is {shape.n}; other formats convert."
    return "llama.cpp: N suits the K-quants."
