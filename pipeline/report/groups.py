"""Evaluations of one carve under several seeds as one figure, and carves of several widths as curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from models.config import MoEShape
from pipeline.report.evaluations import Evaluation
from pipeline.report.methods import method_of
from stages.plots.curves import Curve, Point

TINY = 1e-6  # nats; below it there is no ratio to speak of


@dataclass(frozen=True)
class Group:
    """Evaluations that differ in nothing but the seed."""

    members: Sequence[Evaluation]

    @property
    def shape(self) -> MoEShape:
        """The shape they share."""
        return self.members[0].shape

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings they share."""
        return self.members[0].settings

    @property
    def seeds(self) -> list[int]:
        """Their seeds, ascending."""
        return sorted({member.seed for member in self.members})

    def point(self, name: str) -> Point | None:
        """Mean gap of a model over the seeds, with its extremes."""
        gaps = [gap for member in self.members if (gap := member.gap(name)) is not None]
        if not gaps:
            return None
        return Point(self.members[0].share, sum(gaps) / len(gaps), min(gaps), max(gaps), len(gaps))


def group_by_seed(evaluations: Iterable[Evaluation]) -> list[Group]:
    """Groups, from the widest carve to the narrowest. Of several with the same seed the one first met counts."""
    groups: list[list[Evaluation]] = []
    for evaluation in evaluations:
        same = next((group for group in groups if _same_carve(group[0], evaluation)), None)
        if same is None:
            groups.append([evaluation])
        elif evaluation.seed not in {member.seed for member in same}:
            same.append(evaluation)
    return sorted((Group(group) for group in groups), key=lambda group: -group.members[0].share)


def _same_carve(first: Evaluation, second: Evaluation) -> bool:
    return first.shape == second.shape and first.settings == second.settings


def same_method(group: Group, wanted: Evaluation) -> bool:
    """Whether the group is that carve at some width: the same settings and topology, as many experts as large."""
    mine, theirs = ((shape.experts, shape.n, shape.topology) for shape in (group.shape, wanted.shape))
    return mine == theirs and group.settings == wanted.settings


def relative_to(groups: Sequence[Group], reference: str, names: Sequence[str], most: float) -> list[Curve]:
    """The curves as parts of the gap of `reference` at the same width; without those that ever exceed `most`."""
    gaps = {point.x: point.mean for group in groups if (point := group.point(reference)) is not None}
    curves = []
    for curve in curves_of(groups, names):
        points = [_divided(point, gaps[point.x]) for point in curve.points if gaps.get(point.x, 0.0) > TINY]
        if points and max(point.mean for point in points) <= most:
            curves.append(replace(curve, points=points))
    return curves


def _divided(point: Point, by: float) -> Point:
    return replace(point, mean=point.mean / by, low=point.low / by, high=point.high / by)


def curves_of(groups: Sequence[Group], names: Sequence[str]) -> list[Curve]:
    """A curve for each model, from wide to narrow; the dense model is where they start."""
    curves = []
    for name in names:
        method = method_of(name, names)
        points = [point for group in groups if (point := group.point(name)) is not None]
        if name != "dense" and points:
            curves.append(Curve(method.name, method.kind, method.marker, points))
    return curves
