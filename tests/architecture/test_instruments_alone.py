"""Instruments work in any training loop's folder, without our other packages or libraries that they do not need."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Public entry → its import line, and libraries that it must not load.
ENTRIES = {
    "watch_model": (
        "from tiny_onn import watch_model",
        ("transformers", "jaxtyping", "numba", "matplotlib", "safetensors", "accelerate"),
    ),
    "auto_diff": ("from tiny_onn import auto_diff", ("transformers", "matplotlib")),
    "analyze_tensor": ("from tiny_onn import analyze_tensor", ("transformers", "matplotlib")),
    "static_check": ("from tiny_onn import static_check", ("torch", "transformers")),
    "TensorDump": (
        "from instruments.tensor_dump.tensor_dump import TensorDump",
        ("transformers", "matplotlib", "jaxtyping", "numba", "tabulate"),
    ),
    "DumpReader": ("from instruments.tensor_dump.reader import DumpReader", ("transformers", "matplotlib")),
    "ParameterTensorScanner": (
        "from instruments.parameter_scan.scanner import ParameterTensorScanner",
        ("transformers", "matplotlib"),
    ),
    "MscanWriter": ("from instruments.parameter_scan.writer import MscanWriter", ("transformers", "matplotlib")),
    "read_mscan": ("from instruments.parameter_scan.reader import read_mscan", ("torch", "transformers", "matplotlib")),
}


@pytest.fixture(scope="module")
def foreign_project(tmp_path_factory):
    """A foreign project with our package installed; its own modules have the names of ours."""
    root = tmp_path_factory.mktemp("foreign")
    project, installed = root / "project", root / "site-packages"
    for folder in (project / "models", project / "stages", installed):
        folder.mkdir(parents=True)
    foreign = "raise ImportError('a module of the foreign project')\n"
    for name in ("models.py", "utils.py", "pipeline.py", "models/__init__.py", "stages/__init__.py"):
        (project / name).write_text(foreign)
    for package in ("instruments", "models", "stages", "pipeline", "tiny_onn"):
        (installed / package).symlink_to(REPOSITORY / package)
    return project, installed


MODEL = """
class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))

model, ids = Small(), torch.arange(7)[None]
"""
# Code that uses each entry with MODEL.
USES = {
    "watch_model": "watch_model(model)\nmodel(input_ids=ids).sum().backward()",
    "auto_diff": "assert auto_diff(model, {'input_ids': ids}, precision='bf16').verdict",
    "TensorDump": "with TensorDump(model, 'dump'):\n    model(input_ids=ids).sum().backward()",
    "ParameterTensorScanner": "with ParameterTensorScanner(model) as scanner:\n"
    "    model(input_ids=ids).sum().backward()\n    assert list(scanner.collect())",
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_works_in_a_foreign_project(foreign_project, name):
    """transformers is never imported, so that models lack what it adds to torch's layers."""
    project, installed = foreign_project
    line, unwanted = ENTRIES[name]
    lines = [
        "import sys",
        line,
        f"assert callable({name})",
        "ours = {name for name in sys.modules if name.split('.')[0] in {'models', 'stages', 'pipeline', 'utils'}}",
        "assert not ours, ours",
        f"heavy = {set(unwanted)} & set(sys.modules)",
        "assert not heavy, heavy",
    ]
    if name in USES:
        lines += ["import torch", MODEL, USES[name], "assert 'transformers' not in sys.modules"]
    (project / f"train_{name}.py").write_text("\n".join(lines))
    command = [sys.executable, f"train_{name}.py"]  # its folder comes first in sys.path
    environment = {"PYTHONPATH": str(installed), "PATH": ""}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
