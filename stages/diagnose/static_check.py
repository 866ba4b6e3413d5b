"""check=static_check: training code, read and not run."""

import json

from models.numerics.static.check import static_check
from stages.contracts.job import Table
from stages.diagnose.request import Request


def check_code(request: Request) -> Table:
    """Write `static_check.json`; the table has a row for every finding."""
    settings = request.settings.static_check
    report = static_check(settings.paths, device=settings.device)
    records = [finding.record() for finding in report.findings]
    (request.job.out / "static_check.json").write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n")
    rows = [(f"{one.path}:{one.line}", one.code, one.severity, one.message) for one in report.findings]
    title = f"{report.files:,} files checked, {len(rows):,} findings"
    return Table(title, ("where", "rule", "severity", "what"), rows)
