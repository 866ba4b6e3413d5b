import pytest
import torch

from models.capture.parameters.call import CallFacts
from models.capture.parameters.inputs import split_samples
from models.capture.parameters.layout import Layout
from models.capture.parameters.scan_pass import Buffers, ScanPass
from models.capture.parameters.transfer import Measured, to_record
from models.capture.records import WatchedParameter
from models.errors import ConfigError, NumericsError

LAYOUT = Layout.of([WatchedParameter("embed", "embedding", 11, 6, 4), WatchedParameter("q", "linear", 6, 12, 4)])


def test_groups_of_the_buffer_and_their_places():
    assert LAYOUT.widths == [2, 2, 2, 2, 5]
    buffer_BW = LAYOUT.empty(3, torch.device("cpu"))
    LAYOUT.write(
        buffer_BW, 1, activation=(torch.full((3,), 4.0), torch.ones(3, 2)),
        gradient=(torch.full((3,), 9.0), torch.full((3, 2), 2.0), torch.full((3, 3), 3.0)),
    )  # fmt: skip
    nan = torch.nan
    expected = torch.tensor([nan, 4, nan, 9, 1, 1, 2, 2, nan, nan, 3, 3, 3])
    torch.testing.assert_close(buffer_BW, expected.expand(3, -1), equal_nan=True)


def test_what_several_devices_measured_becomes_one_record():
    """Each device has a buffer of its own; two keys stand for them here."""
    facts = CallFacts(2, 3, torch.tensor([[True, True, False], [True] * 3]), None)
    first, second = LAYOUT.empty(2, torch.device("cpu")), LAYOUT.empty(2, torch.device("cpu"))
    LAYOUT.write(first, 0, gradient=(torch.full((2,), 16.0), None, torch.full((2, 2), 8.0)))
    LAYOUT.write(second, 1, gradient=(torch.full((2,), 9.0), torch.full((2, 2), 4.5), torch.full((2, 3), 3.0)))
    buffers = Buffers({torch.device("cpu"): first, torch.device("cpu", 0): second}, with_gradient={0, 1})
    record, skipped = to_record(Measured(ScanPass(facts, LAYOUT, ["a", "b"]), buffers), gradients=True)
    assert record.gradient_BP.tolist() == [[4, 3], [4, 3]]
    assert [(sequence.name, sequence.tokens) for sequence in record.sequences] == [("a", 2), ("b", 3)]
    assert record.activation_BP.isnan().all()
    assert not skipped


def test_a_pass_that_no_gradient_reached():
    buffers = Buffers({torch.device("cpu"): LAYOUT.empty(1, torch.device("cpu"))})
    with pytest.raises(NumericsError) as caught:
        to_record(Measured(ScanPass(CallFacts(1, 3, None, None), LAYOUT, ["a"]), buffers), gradients=True)
    assert str(caught.value) == (
        "no gradient reached a watched parameter in 1 of 1 samples\n"
        "  where: a\n"
        "  do:    call backward on a loss of what the scanned model returned"
    )


def test_samples_of_a_module_that_sees_all_tokens_in_a_row():
    flat = torch.arange(12.0).view(6, 2)
    assert torch.equal(split_samples(flat, 2, 3, "router"), flat.view(2, 3, 2))
    with pytest.raises(ConfigError) as caught:
        split_samples(flat[:5], 2, 3, "experts.0.up_proj")
    assert str(caught.value) == (
        "experts.0.up_proj was given a tensor of shape (5, 2); expected 2 samples of 3 positions\n"
        "  where: ParameterTensorScanner\n"
        "  do:    leave it out: patterns=[...]"
    )
