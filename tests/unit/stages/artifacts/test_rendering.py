"""Tables and quantities as text."""

import pytest

from stages.artifacts.job import Table
from stages.artifacts.rendering import in_mib, in_millions, in_time, render, show


def test_a_table_with_its_notes():
    rows = ((0, 1.23456789, 12345), (1, 2.0, 7), ("all", "+0.0500", None))
    assert render(Table("Neurons", ("layer", "loss", "tokens"), rows, ("a note", "another")), "github") == (
        "Neurons\n\n"
        "| layer   |    loss |   tokens |\n|---------|---------|----------|\n"
        "| 0       |   1.235 |   12,345 |\n| 1       |       2 |        7 |\n| all     | +0.0500 |        – |\n"
        "\na note\nanother"
    )
    assert render(Table("T", ("a",), ((1,),)), "simple") == "T\n\na\n---\n1"


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (show(True), "True"),
        (show(-12345), "-12,345"),
        (show(0.123456), "0.1235"),
        (show([1]), "[1]"),
        (in_mib(3 << 29), "1,536.0 MiB"),
        (in_millions(1_234_000), "1.23 M"),
        (in_millions(7_620_000_000), "7.62 B"),
        (in_time(12.34), "12.3 s"),
        (in_time(600), "10 min"),
        (in_time(7200), "2.0 h"),
    ],
)
def test_quantities(shown, wanted):
    assert shown == wanted
