"""What was dumped, for the console and the run report."""

from pathlib import Path

from models.dump.config import DumpConfig
from models.dump.listing import list_dump
from models.dump.manifest import Manifest
from models.dump.records import STORED
from stages.contracts.job import Table


def summarise(folder: Path, manifest: Manifest, config: DumpConfig, *, seconds: float) -> Table:
    """The closing table; what is missing or suspicious stands below it."""
    listing = list_dump(folder)
    stored = {record.key for record in listing.records if record.status == STORED}
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows = [
        ("modules", f"{len(manifest.expected)}"),
        ("steps", f"{manifest.steps}"),
        ("records", f"{len(listing.records)}"),
        ("tensors stored, those that layers share once", f"{len(stored)}"),
        ("written", f"{size / 2**20:.1f} MiB"),
        ("time", f"{seconds:.1f} s, {size / 2**20 / max(seconds, 1e-9):.0f} MiB/s"),
    ]
    return Table("Tensors dumped", ("what", "value"), rows, manifest.complaints(config))
