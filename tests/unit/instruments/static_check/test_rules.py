"""rules.toml: every rule finds its example at the marked lines, and nothing in the healthy twin."""

import pytest

from instruments.static_check import check
from instruments.static_check.source import GRADES, RULES

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.amp import GradScaler, autocast

"""
EXAMPLES = {f"{code} {name}": text for code, rule in RULES.items() for name, text in rule["examples"].items()}


def test_every_rule_has_a_severity_a_reason_a_remedy_and_an_example():
    for rule in RULES.values():
        assert rule["severity"] in GRADES
        assert rule["why"]
        assert rule["fix"]
        assert rule["examples"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_finds_its_example_and_nothing_in_the_healthy_twin(name, tmp_path):
    lines, file = EXAMPLES[name].splitlines(), tmp_path / "train.py"
    risky, healthy = (HEAD + "".join(f"{line[1:]}\n" for line in lines if line[:1] != mark) for mark in "+-")
    file.write_text(risky)
    expected = {number for number, line in enumerate(risky.splitlines(), 1) if line.endswith("# !")}
    assert expected
    assert {one.line for one in check.static_check(file).findings if one.code == name[:5]} == expected
    file.write_text(healthy)
    assert [str(one) for one in check.static_check(file).findings] == []


LOOP = "for x in b:\n    loss = model(x).loss\n{}    loss.backward()\n    o.step()\n    o.zero_grad()\n"
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
TRAINED = "o = torch.optim.AdamW(model.parameters())\n" + LOOP.format("")


@pytest.mark.parametrize(
    ("rule", "risky", "healthy"),
    [
        # Types that are known as one of two, or from a function, a table or a name.
        ("LP103", "t = torch.half if old else torch.bfloat16\nF.softmax(x.to(t), -1)", ("torch.half", "torch.float")),
        ("LP103", "def t():\n    if a:\n        return torch.half\n    return torch.bfloat16\nF.softmax(x.to(t()), -1)",
         ("torch.half", "torch.float32")),
        ("LP103", "t = {1: torch.half, 2: torch.bfloat16}\nF.softmax(x.to(t[k]), -1)", ("torch.half", "torch.float")),
        ("LP103", "F.softmax(x.to(getattr(torch, 'bfloat16')), -1)", ("bfloat16", "float32")),
        ("LP103", "if old:\n    t = torch.half\nelse:\n    t = torch.bfloat16\nF.softmax(x.to(t), -1)",
         ("torch.half", "torch.float32")),
        ("LP101", "t = torch.half if a else torch.bfloat16\nmodel = Auto.from_pretrained(n, torch_dtype=t)\n" + TRAINED,
         (", torch_dtype=t", "")),
        ("LP101", "model = Net()\nif a == 1:\n    pass\nelif a == 2:\n    model = model.half()\n" + TRAINED,
         ("model = model.half()", "vae = vae.half()")),
        # Clipping before there are gradients.
        ("LP207", LOOP.format(CLIP), (CLIP + "    loss.backward()\n", "    loss.backward()\n" + CLIP)),
        ("LP207", LOOP.format("    acc.clip_grad_norm_(ps, 1.0)\n"),
         ("    loss.backward()", "    o.step()\n    loss.backward()")),
        # Positions and angles.
        ("LP110", "t = torch.arange(n).to(torch.bfloat16)", ("n", "256")),
        ("LP110", "t = torch.arange(n).float()\nf = torch.outer(t, w).half()", (".half()", ".cos().half()")),
        ("LP110", "q = q.half()\nt = torch.arange(n).type_as(q)", ("q = q.half()", "pass")),
        ("LP110", "q = q.half()\nf = (torch.arange(n)[:, None] * w).to(q.dtype)",
         (".to(q.dtype)", ".sin().to(q.dtype)")),
        ("LP110", "def angles(w, position_ids):\n    return (w[:, None] @ position_ids.float()).cos()", (" @ ", " * ")),
        ("LP110", "def angles(t, inv_freq):\n    with autocast('cuda'):\n        return torch.einsum(e, t, inv_freq)",
         ("'cuda'", "'cuda', enabled=False")),
        # Constants.
        ("LP107", "x = x.half()\nx[m] = -1e9", ("-1e9", "float('-inf')")),
        ("LP107", "m = (1.0 - m.half()) * -1e9", ("1.0 - ", "2.0 * ")),
        ("LP107", "s = x.half().masked_fill(m, torch.finfo(torch.float32).min)", ("float32", "float16")),
        ("LP107", "s = torch.tensor(-1e9).to(torch.float16)", ("-1e9", "-1e4")),
        ("LP107", "s = x.half().masked_fill(m, float(torch.finfo().min))", ("torch.finfo().min", "'-inf'")),
        ("LP110", "p = position_ids.half()[:, None] * w", (".half()", ".float()")),
        ("LP110", "t = torch.arange(n) * 1.0\nf = torch.cat((torch.outer(t, w),) * 2)\nf = torch.stack([t]).half()",
         (".half()", ".cos().half()")),
        ("LP101", "t = 'float16' if a else 'bfloat16'\nmodel = Auto.from_pretrained(n, torch_dtype=t)\n" + TRAINED,
         ("'float16'", "'float32'")),
        # Formulas, and calls that another object makes.
        ("LP108", "y = torch.exp(x.half() ** 2)", ("x.half()", "-x.half()")),
        ("LP108", "y = torch.exp(x.half().square() / 2)", ("exp(", "exp(-0.5 * ")),
        ("LP108", "d = x.half()\ny = torch.exp(gamma * d**2)", ("gamma", "-gamma")),
        ("LP108", "y = torch.exp(x.half().square())", ("square()", "square().neg()")),
        ("LP401", "from accelerate import Accelerator\na = Accelerator(mixed_precision='fp16')\na.backward(loss)\n"
         "if a.sync_gradients:\n    nn.utils.clip_grad_norm_(ps, 1.0)", ("nn.utils", "a")),
        ("LP401", "from accelerate import Accelerator\na = Accelerator(mixed_precision='fp16')\nmodel = a.prepare(m)\n"
         "if accelerate.__version__ > '1':\n    nn.utils.clip_grad_norm_(ps, 1.0)", ("a.prepare(m)", "m.to(a.device)")),
        ("LP103", "q = q.half()\nF.softmax(q @ q.mT / q.shape[-1] ** 0.5, -1)", ("/ q", "/ w[: q.shape[-1]] / q")),
        # Names that only sound like float32 copies of weights, and methods that only sound like making an optimizer.
        *(("LP101", f"model = Net().half()\nprint({name})\n" + TRAINED, (name, "master_weights"))
          for name in ("master_process", "is_master", "isMaster", "args.master_port")),
        *(("LP201", "s = GradScaler()\nclass T:\n    def fit(self):\n        s.scale(loss).backward()\n"
           f"        self.{name}()\n    def {name}(self):\n    {CLIP}        s.step(o)\n        s.update()",
           ("        nn", "        s.unscale_(o)\n        nn"))
          for name in ("optimizer_step", "_optimizer_step", "optimize_parameters")),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_its_healthy_twin_is_not(rule, risky, healthy, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(HEAD + risky)
    assert [one.code for one in check.static_check(file).findings] == [rule]
    assert healthy[0] in risky
    file.write_text(HEAD + risky.replace(*healthy))
    assert [str(one) for one in check.static_check(file).findings] == []
