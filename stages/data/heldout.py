"""Keeps held-out documents apart from calibration documents."""

from collections.abc import Iterable, Iterator

from stages.data.document import Document, Split


def is_heldout(digest: bytes, share: float) -> bool:
    """Whether the thing with this 8-byte digest is among the held-out `share`; the same on every machine."""
    return int.from_bytes(digest, "big") < share * 2**64


def take_share(documents: Iterable[Document], split: Split, share: float) -> Iterator[Document]:
    """The documents of one split, chosen by content, so that copies of a document fall on the same side."""
    for document in documents:
        if is_heldout(document.digest, share) == (split == "heldout"):
            yield document


def leave_out_copies(documents: Iterable[Document], heldout: Iterable[Document]) -> Iterator[Document]:
    """The documents that do not also occur in the held-out text."""
    known = {document.digest for document in heldout}
    return (document for document in documents if document.digest not in known)
