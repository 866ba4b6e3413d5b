import pytest
from unit.instruments.parameter_scan.recordings import INPUTS, OUTPUTS, PARAMETERS, WIDTH, P

from instruments.errors import ContractError
from instruments.parameter_scan.file_format import ParameterTable


def test_blocks_of_all_weights_are_concatenated():
    table = ParameterTable(tuple(PARAMETERS), WIDTH)
    assert table.widths == (P, INPUTS, OUTPUTS)
    assert table.input_columns == [slice(0, 0), slice(0, 3), slice(3, 9), slice(9, 12)]
    assert table.output_columns == [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)]
    with pytest.raises(ContractError):
        table.index("model.layers.1.self_attn.o_proj.weight")
