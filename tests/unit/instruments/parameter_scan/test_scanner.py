import torch
from operator_counts import count_operators
from pico import write_pico
from transformers import AutoModelForCausalLM

from instruments import device
from instruments.parameter_scan.file_format import WatchedParameter
from instruments.parameter_scan.passes import CallFacts, ScanPass, Squares
from instruments.parameter_scan.scanner import ParameterTensorScanner, to_record

PARAMETERS = [WatchedParameter("embed", "embedding", 11, 6, 4), WatchedParameter("q", "linear", 6, 12, 4)]


def test_a_record_holds_the_roots_of_the_squares():
    facts = CallFacts(2, 3, torch.tensor([[True, True, False], [True] * 3]), torch.tensor([1.0, 2]))
    squares = Squares(
        activation={0: torch.full((2, 1), 25.0), 1: torch.tensor([[9.0, 16]] * 2)},
        in_gradient={1: torch.tensor([[9.0, 16]] * 2)},
        out_gradient={0: torch.tensor([[9.0, 16]] * 2), 1: torch.tensor([[4.0, 4, 1]] * 2)},
    )
    record, skipped = to_record(ScanPass(facts, ["a", "b"]), squares, PARAMETERS, gradients=True)
    assert record.activation_BP.tolist() == [[5, 5]] * 2
    assert record.gradient_BP.tolist() == [[5, 3]] * 2
    assert record.in_activation_BI.tolist() == record.in_gradient_BI.tolist() == [[3, 4]] * 2
    assert record.out_gradient_BO.tolist() == [[3, 4, 2, 2, 1]] * 2
    assert [(sequence.name, sequence.tokens) for sequence in record.sequences] == [("a", 2), ("b", 3)]
    assert not skipped


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


def test_operators_of_a_scan_grow_with_linears_alone_and_those_of_a_record_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    (two, record), (three, larger), batch = (count_scan(tmp_path, *each) for each in ((2, 2), (3, 2), (2, 5)))
    assert three - two <= 7 * 12 + 4 * 6  # the norms of seven Linear layers, and of their four inputs
    assert record == larger <= 80
    assert batch == (two, record)
