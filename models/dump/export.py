"""A dump as one `.pt` file for each tensor, for readers that expect them."""

from pathlib import Path

import torch
from tqdm import tqdm

from models.dump.reader import DumpReader
from models.dump.records import STORED


def export_pt(reader: DumpReader, folder: Path) -> int:
    """Write `<name>.pt` for every stored tensor: a dictionary of the tensor and all that its record says.

    `torch.load(path, weights_only=True)` reads them. Returns how many there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = [record for record in reader.records if record.status == STORED]
    for record in tqdm(stored, desc="export", unit="tensor", disable=None):
        torch.save({"tensor": reader.load(record), **record.to_row()}, folder / f"{record.name}.pt")
    return len(stored)
