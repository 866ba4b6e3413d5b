"""Settings that are sound alone and contradict each other, the source model, or the way the command was started."""

from collections.abc import Iterator, Mapping
from typing import Any

from models.errors import ConfigError
from pipeline.schema import Settings
from pipeline.stages_table import ALL, STAGES, asked_stages, with_ancestors
from stages.contracts.workers import find_workers


def contradictions(settings: Settings) -> Iterator[ConfigError]:
    """What can be told without the source."""
    if involves(settings, "score") and settings.score.method == "taylor" and not settings.scan.gradients:
        yield ConfigError(
            "score.method=taylor needs gradients, and scan.gradients=false computes none",
            where="settings score.method and scan.gradients",
            do="scan.gradients=true, or score.method=contribution",
        )
    workers = find_workers().world
    if workers > 1 and settings.model.device_map != "none":
        yield ConfigError(
            f"model.device_map={settings.model.device_map} spreads one model over all devices; torchrun started "
            f"{workers} workers, and each loads its own",
            where="setting model.device_map",
            do="model.device_map=none, or python -m pipeline without torchrun",
        )


def involves(settings: Settings, stage: str) -> bool:
    """Whether `stage` is to be run, or a result of it used; of an unknown stage nothing is known."""
    known = settings.stage in {ALL, *STAGES}
    return known and any(other.name == stage for other in with_ancestors(asked_stages(settings.stage)))


def map_errors(settings: Settings, source: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Layers to draw that the source does not have, by its config.json."""
    if not involves(settings, "cluster") or settings.cluster.map == "none":
        return
    wanted, layers = settings.cluster.map_layers, int(source["num_hidden_layers"])
    if unknown := [layer for layer in wanted if not -layers <= layer < layers]:
        yield ConfigError(
            f"no layer {', '.join(map(str, unknown))}: the model has {layers}",
            where="setting cluster.map_layers",
            do="cluster.map_layers=[] for the first, the middle and the last",
        )
