"""check=analyze_tensor: what tensors of a file, or activations of the model, would lose in low precision."""

import json
from pathlib import Path

from models.numerics.tensor.analysis import analyze_tensor
from models.numerics.tensor.summary import COLUMNS, notes_of, rows_of, to_json
from stages.contracts.job import Table
from stages.diagnose.activations import read_activations
from stages.diagnose.request import Request
from stages.diagnose.tensor_file import read_tensors
from stages.plots.tensor_precision import draw_tensor

_MOST_PICTURES = 12


def analyze_tensors(request: Request) -> Table:
    """Write `analyze_tensor.json` and pictures of the first tensors."""
    asked = request.settings.analyze_tensor
    tensors = read_tensors(Path(asked.file), asked.tensors) if asked.file else read_activations(request, asked.modules)
    found, notes = [], []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            found.append(analyze_tensor(tensor, asked.formats, name=name))
        else:
            notes.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: not analysed")
    (request.job.out / "analyze_tensor.json").write_text(json.dumps(to_json(found), indent=1) + "\n")
    for number, one in enumerate(found[:_MOST_PICTURES]):
        draw_tensor(one, request.job.out / f"tensor_{number:02}.png")
    if len(found) > _MOST_PICTURES:
        notes.append(f"pictures of the first {_MOST_PICTURES} of {len(found)} tensors")
    return Table("What tensors lose in low precision", COLUMNS, rows_of(found), [*notes_of(found), *notes])
