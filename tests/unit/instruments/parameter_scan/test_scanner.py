import pytest
import torch

from instruments.errors import NumericsError
from instruments.parameter_scan.parameters import WatchedParameter
from instruments.parameter_scan.passes import CallFacts, ScanPass, Squares
from instruments.parameter_scan.scanner import join_blocks, to_record

PARAMETERS = [WatchedParameter("embed", "embedding", 11, 6, 4), WatchedParameter("q", "linear", 6, 12, 4)]


def test_blocks_are_in_the_order_of_the_parameters():
    blocks, totals = join_blocks({1: torch.tensor([[1.0, 2]] * 3), 2: torch.full((3, 1), 4.0)}, [1, 2, 1], 3)
    torch.testing.assert_close(blocks, torch.tensor([[torch.nan, 1, 2, 4]] * 3), equal_nan=True)
    torch.testing.assert_close(totals, torch.tensor([[torch.nan, 3, 4]] * 3), equal_nan=True)


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


def test_a_pass_without_gradients_is_an_error():
    with pytest.raises(NumericsError, match=r"^no gradient reached a watched parameter in 1 of 1 samples"):
        to_record(ScanPass(CallFacts(1, 3, None, None), ["a"]), Squares(), PARAMETERS, gradients=True)
