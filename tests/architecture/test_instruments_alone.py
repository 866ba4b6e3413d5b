"""Instruments work in any training loop's folder, without our other packages or libraries that they do not need."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Of our dependencies the instruments need torch, numpy and safetensors alone; others are missing here.
MISSING = ("accelerate", "beartype", "hydra", "jaxtyping", "matplotlib", "numba", "sklearn", "tabulate", "tqdm",
           "transformers", "umap")  # fmt: skip
# Public entry → its module.
ENTRIES = {
    "watch_model": "tiny_onn",
    "auto_diff": "tiny_onn",
    "analyze_tensor": "tiny_onn",
    "static_check": "tiny_onn",
    "TensorDump": "instruments.tensor_dump.tensor_dump",
    "DumpReader": "instruments.tensor_dump.reader",
    "ParameterTensorScanner": "instruments.parameter_scan.scanner",
    "MscanWriter": "instruments.parameter_scan.writer",
    "read_mscan": "instruments.parameter_scan.reader",
}
# Entries that load less.
WITHOUT = {"watch_model": "safetensors", "static_check": "torch", "read_mscan": "torch"}


@pytest.fixture(scope="module")
def foreign_project(tmp_path_factory):
    """A foreign project with our package installed, and not MISSING; its own modules have the names of ours."""
    root = tmp_path_factory.mktemp("foreign")
    project, installed = root / "project", root / "site-packages"
    for folder in (project / "models", project / "stages", installed):
        folder.mkdir(parents=True)
    foreign = "raise ImportError('a module of the foreign project')\n"
    for name in ("models.py", "utils.py", "pipeline.py", "models/__init__.py", "stages/__init__.py",
                 *(f"{name}.py" for name in MISSING)):  # fmt: skip
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
    "analyze_tensor": "assert str(analyze_tensor(torch.ones(3, 7)))",
    "TensorDump": "with TensorDump(model, 'dump'):\n    model(input_ids=ids).sum().backward()\n"
    "from instruments.tensor_dump.command import main\n"
    "assert main(['show', 'dump']) == main(['compare', 'dump', 'dump']) == 0",
    "ParameterTensorScanner": "with ParameterTensorScanner(model) as scanner:\n"
    "    model(input_ids=ids).sum().backward()\n    assert list(scanner.collect())",
}


# Runs each script in a fork of a process that has imported nothing of ours; torch only once, for those that use it.
RUN_ALL = """
import os, runpy, sys, traceback
for script in sys.argv[1:]:
    if script.startswith("with_torch"):
        import torch
    if not (child := os.fork()):
        code = 1
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print("ended", script, os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(foreign_project):
    """Entry → exit status of a script that imports and uses it, and what all of them wrote on stderr."""
    project, installed = foreign_project
    scripts = {}
    for name in sorted(ENTRIES, key=lambda name: WITHOUT.get(name) != "torch"):
        lines = [
            "import sys",
            f"from {ENTRIES[name]} import {name}",
            f"assert callable({name})",
            "ours = {name for name in sys.modules if name.split('.')[0] in {'models', 'stages', 'pipeline', 'utils'}}",
            "assert not ours, ours",
            f"assert {WITHOUT.get(name)!r} not in sys.modules",
        ]
        if name in USES:
            lines += ["import torch", MODEL, USES[name]]
        scripts[name] = f"{'alone' if WITHOUT.get(name) == 'torch' else 'with_torch'}_{name}.py"
        (project / scripts[name]).write_text("\n".join(lines))
    (project / "run_all.py").write_text(RUN_ALL)
    command = [sys.executable, "run_all.py", *scripts.values()]  # its folder comes first in sys.path
    environment = {"PYTHONPATH": str(installed), "PATH": ""}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    ended = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended "))
    return {name: ended[script] for name, script in scripts.items()}, done.stderr


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_works_in_a_foreign_project(outcomes, name):
    ended, said = outcomes
    assert ended[name] == "0", said
