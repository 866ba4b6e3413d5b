"""Settings that nobody reads, given the others: a warning where one was set, and no part of any fingerprint."""

import logging
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from models.shape import Shape
from pipeline.schema import Settings
from pipeline.stages_table import Uses
from stages.cluster.config import NOTHING_RANKED

logger = logging.getLogger(__name__)

# Group → setting → why nobody reads it. Each group's config.py says so beside its fields.
Unread = Mapping[str, Mapping[str, str]]


def find_uses(settings: Settings, shape: Shape | None = None, width: int = 0) -> Uses:
    """What the stages read of each other; without a shape, as much as they may."""
    evaluated = settings.evaluate.checkpoint
    if shape is None:
        return Uses(evaluated)
    cluster = settings.cluster
    return Uses(evaluated, score=cluster.reads_score(shape, width), passes=cluster.needs_pass(shape, width))


def find_unread(settings: Settings, shape: Shape | None = None, width: int = 0) -> Unread:
    """Every setting that nobody reads; without a shape those that depend on none.

    Args:
        settings: all of them.
        shape: of the carve; None where nothing is carved, or no shape can be told.
        width: F of the source.
    """
    found = {
        "scan": settings.scan.unread(),
        "data": settings.data.unread(domains=settings.scan.domains),
        "store": settings.store.unread(),
        "score": settings.score.unread(),
        "train": settings.train.unread(),
    }
    if shape is None:
        return found
    return found | {
        "vocabulary": settings.vocabulary.unread(pooled=shape.pooled),
        "cluster": settings.cluster.unread(shape, width),
        "assemble": settings.assemble.unread(pooled=shape.pooled),
        "project": settings.project.unread(shape, settings.assemble.router),
    }


def warn_of_unread(settings: Settings, shape: Shape | None = None, width: int = 0, *, clusters: bool = True) -> None:
    """Say in the log which settings have no effect; `clusters`: neurons are grouped in this run."""
    found = dict(find_unread(settings, shape, width))
    if clusters and shape is not None and not settings.cluster.reads_score(shape, width):
        ranked = settings.cluster.ranks(shape, width)
        reason = f"cluster.always_on_by={settings.cluster.always_on_by}" if ranked else NOTHING_RANKED
        found["score"] = {spec.name: reason for spec in fields(settings.score)}
    # vocabulary=none says what a pool does.
    quiet = {"vocabulary"} if shape is not None and shape.pooled and not settings.vocabulary.tokens else set()
    for group, reasons in found.items():
        if group not in quiet:
            _warn_where_set(group, getattr(settings, group), reasons)


def _warn_where_set(group: str, node: Any, reasons: Mapping[str, str]) -> None:  # noqa: ANN401 - any dataclass
    for spec in fields(node):
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if spec.name in reasons and (value := getattr(node, spec.name)) != default:
            logger.warning("%s.%s=%s is ignored: %s", group, spec.name, value, reasons[spec.name])
