"""A real scan of a small model, written to a file and read back."""

import numpy as np
import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM
from unit.instruments.parameter_scan.recordings import ARRAYS

from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.writer import MscanWriter

WIDTH = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_pico(tmp_path_factory.mktemp("dense"), "qwen3")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def batches():
    generator = torch.Generator().manual_seed(0)
    for samples in (2, 3):
        ids = torch.randint(1, 40, (samples, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_a_file_holds_the_scanners_records(model, tmp_path):
    path, records = tmp_path / "scan.mscan", []
    scanner = ParameterTensorScanner(model, block_width=WIDTH, per_token=True)
    settings = {"model": "pico", "block_width": WIDTH, "per_token": True, "encoding": "f32"}
    with MscanWriter(path, scanner.parameters, **settings) as writer, scanner:
        for step, batch in enumerate(batches()):
            scanner.name_samples([f"{step}.{row}" for row in range(len(batch["labels"]))], source="made")
            model(**batch).loss.backward()
            for record in scanner.collect():
                records.append(record)
                writer.add(record)
    scan = read_mscan(path)
    assert [(s.number, s.name, s.tokens, s.source) for s in scan.sequences] == [
        (0, "0.0", 6, "made"), (1, "0.1", 9, "made"), (2, "1.0", 6, "made"), (3, "1.1", 9, "made"),
        (4, "1.2", 9, "made"),
    ]  # fmt: skip
    for name, field in ARRAYS.items():
        written = torch.cat([getattr(record, field) for record in records]).numpy()
        found = np.concatenate([segment.array(name) for segment in scan.segments])
        assert np.array_equal(found, written, equal_nan=True)
    assert np.array_equal(scan.tokens("1.0")[1], records[1].token_gradient[0].numpy())
