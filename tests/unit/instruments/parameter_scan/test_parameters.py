import pytest
from unit.instruments.parameter_scan.recordings import INPUTS, OUTPUTS, PARAMETERS, WIDTH, P

from instruments.errors import ContractError
from instruments.parameter_scan.parameters import ParameterTable

TABLE = ParameterTable(tuple(PARAMETERS), WIDTH)


def test_blocks_lie_one_weight_after_another():
    assert TABLE.widths == (P, INPUTS, OUTPUTS)
    assert TABLE.input_columns == [slice(0, 0), slice(0, 3), slice(3, 9), slice(9, 12)]
    assert TABLE.output_columns == [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)]


def test_block_counts_are_those_of_the_scanner():
    for parameter, inputs, outputs in zip(PARAMETERS, TABLE.input_columns, TABLE.output_columns, strict=True):
        assert inputs.stop - inputs.start == parameter.in_blocks
        assert outputs.stop - outputs.start == parameter.out_blocks


def test_an_unknown_weight_is_answered_with_one_that_is_there():
    with pytest.raises(ContractError) as error:
        TABLE.index("model.layers.1.self_attn.q_proj")
    assert str(error.value) == (
        "no parameter model.layers.1.self_attn.q_proj; there are 4\n"
        "  where: parameter table of the .mscan file\n"
        "  do:    say model.layers.1.self_attn.q_proj.weight"
    )


def test_no_parameters():
    assert ParameterTable((), WIDTH).widths == (0, 0, 0)
