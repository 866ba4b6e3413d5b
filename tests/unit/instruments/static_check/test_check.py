"""The static check: every rule on code that breaks it and on code that does not; regions, comments, bad files."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from instruments.errors import ConfigError
from instruments.static_check.check import main, static_check

HEAD = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(3, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = GradScaler()
criterion = nn.CrossEntropyLoss()
"""
WHOLE_STEP = """
for x, y in batches:
    with autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms = [p.grad.norm() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture
def check(tmp_path):
    """Function that returns (line within the code, rule) of every finding."""

    def run(code, *, head=HEAD, **options):
        path = tmp_path / "train.py"
        path.write_text(head + textwrap.dedent(code))
        offset = head.count("\n")
        return [(finding.line - offset, finding.code) for finding in static_check(path, **options).findings]

    return run


def test_a_faultless_training_step_has_no_findings(check):
    assert check(WHOLE_STEP + "    teacher.half()\n") == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = x.to(torch.bfloat16)\nx.log_softmax(-1)", [(2, "LP103")]),
        ("x = x.to(dtype=torch.bfloat16)\ntotal = x.square().sum()", [(2, "LP105")]),
        ("x = x.bfloat16()\ntotal = x.float().sum()", []),
        ("x = x.bfloat16()\ntotal = x.norm() + x.shape[0] * torch.mean(x)", [(2, "LP105"), (2, "LP105")]),
        ("F.softmax(x, -1)\nx.sum()\nsum(x)\nlosses.mean()", []),
        ("x = (x.half() + y.half()).float()\nF.softmax(x, -1)", []),
        ("loss = criterion(x.half(), y)", [(1, "LP102")]),
        ("with autocast('cuda'):\n    z = model(x)\nloss = criterion(z.float(), y)", []),
        (
            "with autocast('cuda'):\n    z = model(x)\n"
            "    with autocast('cuda', enabled=False):\n        F.mse_loss(z, y)",
            [(4, "LP102")],
        ),
        ("with autocast('cuda', dtype=torch.float16):\n    loss = model(x).sum()\nloss.backward()", []),
        ("x = x.half()\nx.sum()  # noqa: LP105\nx.sum()  # noqa\nx.sum()  # noqa: LP103", [(4, "LP105")]),
        ("x = x.half()\nF.softmax(\n    x, -1,  # noqa: E501, LP103\n)\n'# noqa'; x.sum()", [(5, "LP105")]),
        (
            'amp = nullcontext() if device == "cpu" else torch.amp.autocast(device_type="cuda", dtype=torch.float16)\n'
            "with amp:\n    logits = model(x)\nloss = F.cross_entropy(logits, y)",
            [(4, "LP102")],
        ),
        (
            "from functools import partial\namp = partial(torch.autocast, 'cuda', dtype=torch.float16)\n"
            "def train(x, y):\n    with amp():\n        p = model(x)\n    return F.cross_entropy(p, y)",
            [(6, "LP102")],
        ),
        (
            "from contextlib import ExitStack\ndef train(x, y):\n    with ExitStack() as stack:\n"
            "        stack.enter_context(torch.autocast('cuda', torch.float16))\n        p = model(x)\n"
            "    return F.cross_entropy(p, y)",
            [(6, "LP102")],
        ),
    ],
)  # fmt: skip
def test_precision_is_followed_through_values(check, code, expected):
    assert check(code) == expected


def test_the_effect_of_autocast_depends_on_the_device(check):
    """CUDA computes softmax and sum in float32, the CPU does not."""
    code = "with autocast({}):\n    z = x @ y\n    F.softmax(z, -1)\n    z.sum()\n"
    assert check(code.format("'cuda'")) == []
    assert check(code.format("'cpu'")) == [(3, "LP103"), (4, "LP105")]
    assert check(code.format("device")) == []
    assert check(code.format("device"), device="cpu") == [(3, "LP103"), (4, "LP105")]


def test_regions_reach_into_functions_and_modules_of_the_file(check):
    code = """
    class Head(nn.Module):
        def forward(self, x):
            return F.softmax(x @ x.T, -1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Head()

        def forward(self, x):
            return self.head(x)

    def unused(x):
        return F.softmax(x @ x.T, -1)

    net = torch.compile(Net().to("cpu"))

    @torch.autocast("cpu")
    def evaluate(x):
        return (x @ x).sum()

    def train(x):
        with torch.autocast("cpu"):
            return net(x)
    """
    assert check(code) == [(4, "LP103"), (21, "LP105")]


def test_branches_with_equal_conditions_are_taken_together(check):
    code = """
    def step(loss, use_amp):
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not use_amp:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    """
    assert check(code) == []
    assert check(code.replace("            scaler.unscale_(optimizer)\n", "            pass\n")) == [(9, "LP201")]


def test_a_finding_has_place_reason_and_remedy(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(HEAD + "with autocast('cuda'):\n    z = model(x)\nloss = F.mse_loss(z, y)\n")
    assert main([str(path)]) == 1
    finding, why, fix, end = capsys.readouterr().out.splitlines()
    assert finding == f"{path}:13: LP102 severe mse_loss outside autocast, of float16 values"
    assert why.startswith("    why: ")
    assert fix.startswith("    fix: compute the loss inside the autocast block")
    assert end == "1 files checked, 1 findings"


def test_files_that_do_not_parse_are_findings(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "zeros.py").write_bytes(b"x = '\0'\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "deep.py").write_text("x = " + "+".join(["y"] * 2000) + "\n")
    (tmp_path / "fine.py").write_text("x = y.half().sum()\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/bad.py").write_text("x = y.half().sum()\n")
    assert main([str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert f"{tmp_path}/broken.py:2: LP001 severe does not parse: invalid syntax" in out
    assert f"{tmp_path}/deep.py:1: LP001 severe is nested too deeply to be checked" in out
    assert f"{tmp_path}/fine.py:1: LP105" in out
    assert out.endswith("5 files checked, 5 findings\n")


def test_unknown_paths_and_devices_are_refused(tmp_path, check):
    with pytest.raises(ConfigError, match="abacus"):
        check("with autocast(device):\n    x.sum()", device="abacus")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert check("with autocast('npu'):\n    F.softmax(x @ y, -1)") == []  # as on CUDA


@pytest.mark.parametrize(
    ("code", "findings"),
    [
        # A quadratic search takes five minutes.
        ("import torch\n" + "".join(f"x{i} = torch.sum(torch.randn(3).half())\n" for i in range(4000)), 4000),
        ("".join(f"def f{i}(x):\n" + f"    x = f{i + 1}(x)\n" * 40 for i in range(8)), 0),
    ],
    ids=["long", "calls"],
)
def test_the_time_grows_with_the_size_of_the_file_only(tmp_path, code, findings):
    (tmp_path / "many.py").write_text(code)
    began = time.process_time()
    assert len(static_check(tmp_path).findings) == findings
    assert time.process_time() - began < 5


def notebook(path, *cells):
    cells = [{"cell_type": kind, "source": code.splitlines(keepends=True)} for kind, code in cells]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    return path


SUM = "import torch\nx = y.half()\nx.sum()"


@pytest.mark.parametrize(
    ("first", "number"),
    [
        ("%matplotlib inline\nfor _ in x:\n    !ls\n", 2),
        ("%%bash\nif [ 1 ]; then", 2),
        ("!pip install -q \\\n    torch \\\n    numpy\n", 2),
        ("x = (7\n  % 3)", 2),
        (f"%%prun -q\n{SUM}", 1),
    ],
)
def test_cells_are_parsed_one_by_one(tmp_path, first, number):
    file = notebook(tmp_path / "train.ipynb", ("code", first), ("code", SUM if number == 2 else "z = 1"))
    found = [(one.path, one.line, one.code) for one in static_check(file).findings]
    assert found == [(f"{file}[cell {number}]", 3 + (number == 1), "LP105")]


def test_unreadable_cells_and_notebooks_are_findings_and_hide_no_others(tmp_path):
    file = tmp_path / "a.ipynb"
    notebook(file, ("markdown", "x = ("), ("code", "y = 2\nx = ("), ("code", SUM), ("code", "y.half().sum()  # noqa"))
    (tmp_path / "b.ipynb").write_text("{")
    (tmp_path / "c.ipynb").write_text('{"worksheets": []}')
    report = static_check(tmp_path)
    assert [(one.path, one.line, one.code) for one in report.findings] == [
        (f"{file}[cell 2]", 2, "LP001"),
        (f"{file}[cell 3]", 3, "LP105"),
        (f"{tmp_path}/b.ipynb", 1, "LP001"),
        (f"{tmp_path}/c.ipynb", 1, "LP001"),
    ]
    assert report.exit_code == 2


def test_a_cell_of_another_language_is_none_of_ours_also_as_one_string(tmp_path):
    cell = {"cell_type": "code", "source": "%%bash\nls | grep ( x"}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    assert static_check(tmp_path).findings == ()


def test_severity_and_exclude_select_findings(tmp_path):
    """The code has a note, a warning and a severe finding."""
    code = "import torch\np = torch.log(torch.softmax(x, -1))\nq = x.half().sum()\nr = x.half() + 1e-9\n"
    for name in ("train.py", "tests/train.py", "old/deep/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    left_out = ["tests", "old/*"]
    found = {grade: static_check(tmp_path, severity=grade, exclude=left_out) for grade in ("note", "warning", "severe")}
    assert [one.severity for one in found["note"].findings] == ["note", "warning", "severe"]
    assert [one.code for one in found["warning"].findings] == ["LP105", "LP107"]
    assert [one.code for one in found["severe"].findings] == ["LP107"]
    assert {report.files for report in found.values()} == {1}
    assert main([str(tmp_path), "--severity", "severe", "--exclude", "*.py"]) == 0
    with pytest.raises(ConfigError, match="mild"):
        static_check(tmp_path, severity="mild")


def test_a_file_that_only_defines_a_model_has_findings(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\nclass Gate(nn.Module):\n"
        "    def __init__(self, d):\n        super().__init__()\n"
        "        self.proj = nn.Linear(d, d)\n        self.loss = nn.BCELoss()\n"
        "    def forward(self, x, y):\n        p = torch.softmax(self.proj(x), -1)\n        return self.loss(p, y)\n"
        "def build():\n    return Gate(8).half()\n"
    )
    assert {(one.line, one.code) for one in static_check(file).findings} == {
        (10, "LP103"), (11, "LP102"),
    }  # fmt: skip


@pytest.fixture
def check_alone(check):
    """Function that returns (line, rule) of every severe finding in code with its own imports."""
    return lambda code: check(textwrap.dedent(code).lstrip(), head="", severity="severe")


def test_functions_imported_under_other_names(check_alone):
    code = """
    from torch.cuda.amp import GradScaler as GS, autocast as ac
    from torch.nn.utils import clip_grad_norm_ as clip
    gs = GS()
    for x in batches:
        with ac():
            loss = model(x).loss
        gs.scale(loss).backward()
        gs.unscale_(opt)
        clip(model.parameters(), 1.0)
        gs.step(opt)
        gs.update()
    """
    assert check_alone(code) == []
    assert check_alone(code.replace("gs.unscale_(opt)", "pass")) == [(9, "LP201")]


def test_a_function_of_the_file_is_not_taken_for_an_imported_one_of_the_same_name(check_alone):
    code = """
    import torch.nn.functional as F
    from library import loss_of as theirs

    def loss_of(z):
        return F.mse_loss(z.half(), y)

    loss = {}(model(x))
    """
    assert check_alone(code.format("theirs")) == check_alone(code.format("loss_of")) == [(5, "LP102")]


def test_every_function_of_a_name_is_checked(check):
    code = """
    def train():
        def step(x):
            return x

    def train_in_half():
        def step(x):
            return F.mse_loss(x.half(), y)

    class Net:
        @property
        def loss(self):
            return F.mse_loss(self.x.half(), y)

        @loss.setter
        def loss(self, x):
            pass
    """
    assert check(code) == [(8, "LP102"), (13, "LP102")]


@pytest.mark.parametrize("cast", ["m.half()", "m.to(device, dtype=torch.half)"])
def test_a_cast_whose_result_is_dropped_is_one_of_a_module(check_alone, cast):
    code = f"""
    import torch
    m = Big()
    {cast}
    o = torch.optim.SGD([{{"params": m.body.parameters()}}], 0.1)
    m(x).mean().backward()
    o.step()
    """
    assert check_alone(code) == [(3, "LP101")]
    assert check_alone(code.replace(f"\n    {cast}", f"\n    y = {cast}")) == []


def test_optimizers_in_a_list(check_alone):
    code = """
    import torch
    nets = [Net().half() for _ in range(3)]
    opts = [torch.optim.Adam(n.parameters()) for n in nets]
    for x in batches:
        for n, o in zip(nets, opts):
            n(x).mean().backward()
            o.step()
    """
    assert check_alone(code) == [(2, "LP101")]
    assert check_alone(code.replace(".half()", "")) == []


def test_names_of_a_star_import(check_alone):
    code = """
    from fastai.vision.all import *

    def loss_of(x):
        return F.cross_entropy(net(x).half(), y)

    @torch.no_grad()
    def measure(x):
        return F.cross_entropy(net(x).half(), y)

    loss_of(x).backward()
    """
    assert check_alone(code) == [(4, "LP102")]
    assert check_alone(code.replace("@torch.no_grad()", "")) == [(4, "LP102"), (8, "LP102")]
    own = "def cross_entropy(x):\n    return x\n\ncross_entropy(model(x).half()).backward()\n"
    assert check_alone("from common import *\n" + own) == []


def test_the_trainer_and_the_autocast_of_a_star_import(check_alone):
    code = """
    from torch.nn import *
    from torch.cuda.amp import *
    from lightning import *

    class Net(LightningModule):
        def training_step(self, batch, number):
            utils.clip_grad_norm_(self.parameters(), 1.0)

    Trainer(precision="{}").fit(Net())
    for x in batches:
        with autocast():
            loss = model(x).loss
        loss.backward()
    """
    assert check_alone(code.format("16-mixed")) == [(7, "LP402")]
    assert check_alone(code.format("32")) == []


def test_the_package_is_a_command(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nx = torch.ones(3).half() + 1e-9\n")
    command = [sys.executable, "-m", "instruments.static_check", str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    assert (done.returncode, "LP107" in done.stdout) == (1, True)
