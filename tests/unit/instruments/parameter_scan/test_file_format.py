import pytest
from unit.instruments.parameter_scan.recordings import INPUTS, OUTPUTS, PARAMETERS, WIDTH, P

from instruments.errors import ContractError
from instruments.parameter_scan.file_format import ParameterTable

TABLE = ParameterTable(tuple(PARAMETERS), WIDTH)


def test_blocks_of_all_weights_are_concatenated():
    assert TABLE.widths == (P, INPUTS, OUTPUTS)
    assert ParameterTable((), WIDTH).widths == (0, 0, 0)
    assert TABLE.input_columns == [slice(0, 0), slice(0, 3), slice(3, 9), slice(9, 12)]
    assert [(entry.in_blocks, entry.out_blocks) for entry in PARAMETERS] == [(0, 3), (3, 2), (6, 3), (3, 2)]
    assert TABLE.output_columns == [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)]


def test_an_unknown_weight():
    with pytest.raises(ContractError, match=r"^no parameter model.layers.1.self_attn.q_proj; there are model.embed"):
        TABLE.index("model.layers.1.self_attn.q_proj")
