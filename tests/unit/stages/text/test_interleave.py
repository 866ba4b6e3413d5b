from stages.text.documents import interleave


def test_takes_turns_until_all_are_spent():
    assert list(interleave([[1, 2, 3], [], [10], [20, 21]])) == [1, 10, 20, 2, 21, 3]


def test_touches_a_source_only_in_its_turn():
    touched = []

    def source(name):
        touched.append(name)
        yield name

    items = interleave([source("a"), source("b")])
    next(items)
    assert touched == ["a"]
