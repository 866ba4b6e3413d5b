import pytest
from benchmarks.rows import Row, show_rows


def test_the_table_shows_median_spread_and_target():
    table = show_rows([Row("scan ÷ step", [1.0, 0.8, 3.0], at_most=1.05), Row("sets", [250.0], unit="MiB", note="n")])
    assert table.splitlines() == [
        "what         measured    spread         target    met    note",
        "-----------  ----------  -------------  --------  -----  ------",
        "scan ÷ step  1.000       0.800 … 3.000  ≤ 1.05    yes",
        "sets         250 MiB                                     n",
    ]


@pytest.mark.parametrize(
    ("bounds", "met"), [({}, None), ({"at_most": 1.9}, False), ({"at_least": 2.0}, True), ({"at_least": 2.1}, False)]
)
def test_a_target_is_met_by_the_median(bounds, met):
    row = Row("what", [9.0, 2.0, 0.0], **bounds)
    assert row.met is met
    fields = {"what": "what", "values": [9.0, 2.0, 0.0], "at_most": None, "at_least": None, "unit": "", "note": ""}
    assert row.record() == fields | {"measured": 2.0, "met": met} | bounds
