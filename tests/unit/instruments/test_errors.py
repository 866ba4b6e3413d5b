import pytest

from instruments.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("\nno such file\nat line 3"), "no such file"),
        (ValueError("Validation error:\n  heads do not divide 24\n"), "Validation error: heads do not divide 24"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_one_line_says_what_an_error_is(error, line):
    assert first_line(error) == line
