"""Where a walk through the code stands: the file, the class, the autocast region, and what was found so far."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from models.numerics.static.definitions import Definitions, Function
from models.numerics.static.operations import autocast_table
from models.numerics.static.region import Region
from models.numerics.static.rules import RULES, Finding
from models.numerics.static.source import Source
from models.numerics.static.state import State, Value

OFF = Region(enabled=False)


@dataclass
class Report:
    """Of one file; a place that is passed on several ways is reported once."""

    source: Source
    definitions: Definitions
    device: str  # where the file does not say
    findings: set[Finding] = field(default_factory=set)
    walked: set[int] = field(default_factory=set)  # functions, by id of their node

    def add(self, code: str, node: ast.expr, message: str, severity: str | None = None) -> None:
        """Note a finding, unless a comment asks for silence."""
        if not self.source.is_silenced(code, node):
            place = (self.source.path, node.lineno, node.col_offset)
            self.findings.add(Finding(*place, code, message, severity or RULES[code].severity))


@dataclass(frozen=True)
class Frame:
    """One function being walked."""

    report: Report
    call: Callable[["Frame", State, Function, str | None, ast.Call, list[Value]], Value]  # walk into a function
    region: Region = OFF
    class_name: str | None = None
    stack: tuple[Function, ...] = ()

    @property
    def device(self) -> str:
        """Of the region; one that torch cannot be asked about counts as the device of whoever checks."""
        return self.region.device if self.region.device in {"cuda", "cpu", "xpu", "mps"} else self.report.device

    def fate(self, operation: str) -> str:
        """What autocast does to it here; kept outside."""
        if not self.region.enabled:
            return "kept"
        return autocast_table(self.device).get(operation, "kept")
