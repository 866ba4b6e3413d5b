"""The table of targets in models/README.md, generated from their descriptions."""

import re
from pathlib import Path

from models.targets.config import MOE_TARGETS

PAGE = Path(__file__).parents[4] / "models/README.md"
HEADING = "## Targets\n\n"
COLUMNS = ("dense model", "MoE architecture", "always-on neurons", "dense layers", "served by", "what is special")


def table():
    """One row for each target and rank, in the order in which `auto` takes them."""
    ranked = [
        (rank, target, sorted(source for source in target.sources if target.sources[source] == rank))
        for target in MOE_TARGETS.values()
        for rank in sorted({*target.sources.values()})
    ]
    ranked.sort(key=lambda row: (row[0], row[2]))
    rows = [(", ".join(sources), *columns(target)) for _rank, target, sources in ranked]
    rows += [("any other, and those above", *columns(target)) for target in MOE_TARGETS.values() if target.is_tiny_onn]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def columns(target):
    name = target.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    always_on = "none"
    if target.has_shared:
        always_on = "at least one" if target.always_has_shared else "any number"
        always_on = "a multiple of N" if target.shared_as_experts else always_on
        always_on = "at most N" if target.one_shared_expert else always_on
    served = ", ".join(target.runtimes) or "transformers only"
    special = "; ".join(filter(None, [*abilities(target), re.split(r"[.:;] ", target.runtime_note)[0]]))
    return f"{name} (`{target.model_type}`)", always_on, target.dense_layers, served, special or "-"


def abilities(target):
    """What not every architecture can hold of the dense model, and where it does not load."""
    if not target.transformers_4:
        yield "transformers 5 only"
    if target.is_tiny_onn:
        yield "the dense decoder's own code; a pool of experts; images"
        return
    if target.wrappers:
        yield f"images, inside {', '.join(sorted(f'`{name}`' for name in target.wrappers))}"
    if target.carries:
        yield "the family's own attention"
        return
    if target.layer_windows:
        yield "windows in some layers"
    elif target.sliding_window:
        yield "one window for all layers"
    if target.output_bias:
        yield "a bias on `o_proj`"
    if target.partial_rotation:
        yield "partly rotated heads"
    if not target.head_dim:
        yield "only heads of hidden_size ÷ heads"


def test_the_table_of_targets_is_that_of_the_code():
    page = PAGE.read_text()
    shown = page.split(HEADING)[1].split("\n\n")[0] + "\n"
    made = table()
    assert shown == made, f"in {PAGE.name}, below {HEADING.strip()!r}, put this table:\n\n{made}"
