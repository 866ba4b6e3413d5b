from stages.text.documents import Document, leave_out_copies, take_share


def test_share_splits_by_content_and_covers_everything():
    documents = [Document(f"here:{number}", f"text {number}") for number in range(2000)]
    heldout = list(take_share(documents, "heldout", 0.1))
    calibration = list(take_share(documents, "calibration", 0.1))
    assert sorted(heldout + calibration, key=documents.index) == documents
    assert 150 <= len(heldout) <= 250


def test_copies_of_a_document_fall_on_the_same_side():
    for number in range(50):
        copies = [Document("a:1", f"text {number}"), Document("b:2", f"text {number}")]
        assert len(list(take_share(copies, "heldout", 0.5))) in {0, 2}


def test_the_share_is_the_same_on_every_machine():
    documents = [Document("", f"text {number}") for number in range(40)]
    heldout = ["text 2", "text 3", "text 6", "text 18", "text 33", "text 38"]
    assert [document.text for document in take_share(documents, "heldout", 0.1)] == heldout


def test_copies_of_heldout_documents_are_left_out():
    messages = ({"role": "user", "content": "b"},)
    documents = [Document("a:1", "a"), Document("a:2", messages=messages), Document("a:3", "c")]
    heldout = [Document("b:9", messages=messages), Document("b:10", "c"), Document("b:11", "d")]
    assert [document.name for document in leave_out_copies(documents, heldout)] == ["a:1"]
