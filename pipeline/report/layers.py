"""Sections on single layers: routing, error, scores and maps."""

from collections.abc import Mapping

from pipeline.report.chain import Published
from pipeline.report.distributions import describe_distributions, read_scores
from pipeline.report.evaluations import Evaluation
from pipeline.report.numbers import percent
from pipeline.report.pictures import draw_pictures
from pipeline.report.sections import figure, folded, section
from pipeline.report.tables import draw_table
from stages.plots.by_layer import LayerChart, draw_by_layer
from stages.plots.chart import FULL, HALF, MIDDLE, NARROW, draw_for
from stages.plots.load_map import draw_load_map
from stages.plots.markup import Markup, element
from stages.plots.ridges import draw_ridges

HALVES, WHOLE = (NARROW, HALF), (NARROW, MIDDLE, FULL)


def layer_section(evaluation: Evaluation) -> Markup:
    """How closely every carved FFN follows the dense one, and how its router works."""
    return section(
        "layers",
        "Layer by layer",
        element("div", _errors(evaluation), _agreement(evaluation), class_="pair") if evaluation.layers else "",
        _loads(evaluation),
        folded("The numbers", _numbers(evaluation)) if evaluation.layers else "",
    )


def _errors(evaluation: Evaluation) -> Markup:
    values = [float(layer["error"]) for layer in evaluation.layers]
    title = "Reconstruction error"
    chart = LayerChart(f"{title} of every layer", "Σ‖dense − MoE‖² / Σ‖dense‖²", values)
    caption = "Of each FFN's output, on the carved model's own inputs; 0 is the dense FFN."
    return figure(title, draw_for(HALVES, lambda width: draw_by_layer(chart, width)), caption)


def _agreement(evaluation: Evaluation) -> Markup:
    values = [float(layer["agreement"]) for layer in evaluation.layers]
    chance = evaluation.shape.top_k / evaluation.shape.experts
    oracle = "error oracle" if evaluation.shape.pooled else "output oracle"
    title = f"Router's agreement with the {oracle}"
    chart = LayerChart(
        f"{title} in every layer", "share of choices", values, (chance, f"chance {percent(chance)}"), 1.0, percent
    )
    caption = (
        "Share of the chosen experts that would also be chosen by looking at what each takes off the output error."
        if evaluation.shape.pooled
        else "Share of the chosen experts that are also among those of largest output norm."
    )
    return figure(title, draw_for(HALVES, lambda width: draw_by_layer(chart, width)), caption)


def _loads(evaluation: Evaluation) -> Markup:
    loads = [[float(load) for load in layer.get("load", [])] for layer in evaluation.layers]
    if not loads or not all(loads):
        return Markup()
    title = "Expert load"
    drawing = draw_for(WHOLE, lambda width: draw_load_map(f"{title} by layer", loads, width))
    caption = "One row a layer, its experts side by side from the busiest to the idlest."
    return figure(title, drawing, caption, kind="full")


def _numbers(evaluation: Evaluation) -> Markup:
    """All figures of every layer that are single numbers."""
    keys = [key for key, value in evaluation.layers[0].items() if isinstance(value, int | float)]
    rows = [[str(index), *(layer.get(key) for key in keys)] for index, layer in enumerate(evaluation.layers)]
    return draw_table(["layer", *(key.replace("_", " ") for key in keys)], rows)


def neuron_section(chain: Mapping[str, Published]) -> Markup:
    """How the neurons score, and the maps that the cluster stage drew of them."""
    maps = draw_pictures(chain["cluster"]) if "cluster" in chain else []
    return section("neurons", "Neurons", _scores(chain.get("score")), *maps)


def _scores(published: Published | None) -> Markup:
    found = None if published is None else read_scores(published.folder)
    if found is None:
        return Markup()
    name, scores_LF = found
    name = name.replace("s_p", "S_p")
    ridges, ends = describe_distributions(scores_LF)
    title = f"Score by layer: {name}"
    drawing = draw_for(
        WHOLE, lambda width: draw_ridges(f"Distribution of {name} in every layer", name, ridges, ends, width)
    )
    caption = (
        "What neurons are ranked by. Each ridge is one layer's; the dark line spans their middle half, the tick is the "
        "median. Scores are comparable within a layer only."
    )
    return figure(title, drawing, caption, kind="full")
