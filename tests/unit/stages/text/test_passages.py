from stages.text.documents import cut_passages


def test_cuts_at_the_first_blank_line_after_the_shortest():
    lines = ["aaaa\n", "\n", "bbbb\n", " \n", "cccc\n"]
    assert list(cut_passages(lines, shortest=8, longest=100)) == [(1, "aaaa\n\nbbbb"), (5, "cccc")]


def test_cuts_at_a_line_end_where_no_blank_line_comes():
    assert list(cut_passages(["aaaa\n", "bbbb\n", "cccc\n"], shortest=2, longest=10)) == [
        (1, "aaaa\nbbbb"),
        (3, "cccc"),
    ]


def test_keeps_the_indentation_of_the_first_line():
    assert list(cut_passages(["\n", "  a\n", "b \n", "\n"], shortest=9, longest=99)) == [(2, "  a\nb")]


def test_leaves_out_passages_of_white_space():
    assert list(cut_passages(["\n", " \n", "a\n"], shortest=1, longest=2)) == [(3, "a")]
    assert list(cut_passages([], shortest=1, longest=2)) == []
