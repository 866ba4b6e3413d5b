import torch
from operator_counts import count_operators
from pico import write_pico
from transformers import AutoModelForCausalLM

from instruments import device
from instruments.parameter_scan.scanner import ParameterTensorScanner


def count_scan(folder, layers, samples):
    """Operators of a forward and backward pass with the scanner, without it, and of its record; waits of the passes."""
    model = AutoModelForCausalLM.from_pretrained(write_pico(folder / f"{layers}_{samples}", "qwen3", layers=layers))
    ids = torch.randint(1, 61, (samples, 9), generator=torch.Generator().manual_seed(0))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    plain = count_operators(step)
    with ParameterTensorScanner(model, block_width=8) as scanner:
        scanned = count_operators(step)
        record = count_operators(scanner.collect)
    assert scanned.waits == plain.waits
    return scanned.started.total() - plain.started.total(), record.started.total()


def test_operators_of_a_scan_hardly_grow_with_linears_and_those_of_a_record_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    (two, record), (three, larger), batch = (count_scan(tmp_path, *each) for each in ((2, 2), (3, 2), (2, 5)))
    assert three - two <= 7 * 3  # linears of equal sizes share theirs
    assert record == larger <= 80
    assert batch == (two, record)
