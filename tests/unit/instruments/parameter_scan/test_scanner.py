import torch

from instruments.parameter_scan.file_format import WatchedParameter
from instruments.parameter_scan.passes import CallFacts, ScanPass, Squares
from instruments.parameter_scan.scanner import to_record

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
    assert record.token_gradient is None
    assert not skipped
