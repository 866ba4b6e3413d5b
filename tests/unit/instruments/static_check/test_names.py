"""The static check knows functions, models and optimizers also by unusual names."""

import textwrap

import pytest

from instruments.static_check.check import static_check


@pytest.fixture
def check(tmp_path):
    """Function that returns (line, rule) of every severe finding."""

    def run(code):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code).lstrip())
        return [(finding.line, finding.code) for finding in static_check(path, severity="severe").findings]

    return run


def test_functions_imported_under_other_names(check):
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
    assert check(code) == []
    assert check(code.replace("gs.unscale_(opt)", "pass")) == [(9, "LP201")]
    assert check(code.replace("gs.update()", "pass")) == [(10, "LP202")]


def test_a_function_of_the_file_is_not_taken_for_an_imported_one_of_the_same_name(check):
    code = """
    import torch.nn.functional as F
    from library import loss_of as theirs

    def loss_of(z):
        return F.mse_loss(z.half(), y)

    loss = {}(model(x))
    """
    assert check(code.format("theirs")) == check(code.format("loss_of")) == [(5, "LP102")]


@pytest.mark.parametrize("cast", ["m.half()", "m.to(device, dtype=torch.half)"])
def test_a_cast_whose_result_is_dropped_is_one_of_a_module(check, cast):
    code = f"""
    import torch
    m = Big()
    {cast}
    o = torch.optim.SGD([{{"params": m.body.parameters()}}], 0.1)
    m(x).mean().backward()
    o.step()
    """
    assert check(code) == [(3, "LP101")]
    assert check(code.replace(f"\n    {cast}", f"\n    y = {cast}")) == []


def test_optimizers_in_a_list(check):
    code = """
    import torch
    nets = [Net().half() for _ in range(3)]
    opts = [torch.optim.Adam(n.parameters()) for n in nets]
    for x in batches:
        for n, o in zip(nets, opts):
            n(x).mean().backward()
            o.step()
    """
    assert check(code) == [(2, "LP101")]
    assert check(code.replace(".half()", "")) == []


def test_names_of_a_star_import(check):
    code = """
    from fastai.vision.all import *

    def loss_of(x):
        return F.cross_entropy(net(x).half(), y)

    @torch.no_grad()
    def measure(x):
        return F.cross_entropy(net(x).half(), y)

    loss_of(x).backward()
    """
    assert check(code) == [(4, "LP102")]
    assert check(code.replace("@torch.no_grad()", "")) == [(4, "LP102"), (8, "LP102")]
    own = "def cross_entropy(x):\n    return x\n\ncross_entropy(model(x).half()).backward()\n"
    assert check("from common import *\n" + own) == []


def test_the_trainer_and_the_autocast_of_a_star_import(check):
    code = """
    from torch.nn import *
    from torch.cuda.amp import *
    from lightning import *

    class Net(LightningModule):
        def training_step(self, batch, number):
            self.loss_of(batch).backward()

    Trainer(precision="{}").fit(Net())
    for x in batches:
        with autocast():
            loss = model(x).loss
        loss.backward()
    """
    assert check(code.format("16-mixed")) == [(7, "LP402")]
    assert check(code.format("32")) == []
