"""Copies and pickles of an observed model are not observed, and can be made."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from instruments.errors import ConfigError
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.writer import MscanWriter
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from tiny_onn import watch_model

B, T, V, D = 2, 5, 7, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def run(model, scale=1.0):
    """Forward and backward pass."""
    ids = torch.arange(B * T).view(B, T) % V
    (scale * model(input_ids=ids).square().mean()).backward()


def copies(model):
    """A deep copy, and a model from a file without the code of the instruments."""
    file = io.BytesIO()
    torch.save(model, file)
    assert b"instruments" not in file.getvalue().replace(__name__.encode(), b"")
    file.seek(0)
    return copy.deepcopy(model), torch.load(file, weights_only=False)  # noqa: TID251 - a pickle of the test's own


def disturb(model):
    """Copies run, also with NaN, and compute what the model computes."""
    ids = torch.arange(B * T).view(B, T) % V
    with torch.no_grad():
        expected = model(input_ids=ids)
    for other in copies(model):
        assert torch.equal(other(input_ids=ids), expected)
        run(other)
        nn.init.constant_(other.embed.weight, torch.nan)
        run(other)
        run(other)


def test_a_watch(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_model(model, optimizer, log=tmp_path / "log.jsonl") as watch:
        run(model)
        disturb(model)
        optimizer.step()
        assert watch.last.anomalies == ()
        assert watch.next_step == 1


def test_a_scan(tmp_path):
    model = Net()
    parameters = ParameterTensorScanner(model).parameters
    with (
        MscanWriter(tmp_path / "scan.mscan", parameters, model="net", block_width=64) as file,
        ParameterTensorScanner(model) as scanner,
    ):
        run(model)
        disturb(model)
        run(model)
        for record in scanner.collect():
            file.add(record)
    gradient_SP = read_mscan(tmp_path / "scan.mscan").gradient()
    assert gradient_SP.shape == (2 * B, 2)
    assert np.isfinite(gradient_SP).all()
    assert scanner.left_out == {}


def test_a_dump(tmp_path):
    model = Net()
    with TensorDump(model, tmp_path / "dump", environment={}) as dump:
        run(model)
        disturb(model)
        dump.step()
    found = [record.source for record in DumpReader(tmp_path / "dump").records if not record.source.evaluation]
    assert {(one.microbatch, one.call) for one in found} == {(0, 0)}
    assert dump.manifest.nonfinite == []


def test_replicas_of_data_parallel_are_refused(tmp_path):
    model = Net()
    for instrument in (TensorDump(model, tmp_path, environment={}), ParameterTensorScanner(model)):
        with instrument, pytest.raises(ConfigError, match=r"nn\.DataParallel"):
            run(model._replicate_for_data_parallel())
