"""One document of any source, before tokenization."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

Split = Literal["calibration", "heldout"]
Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """Plain text, or a conversation (`messages`, then `text` is empty).

    `name` says where it came from, `domain` what it is about: its file, dataset or module, or what a record says.
    """

    name: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    domain: str = ""

    @property
    def digest(self) -> bytes:
        """8 bytes that depend on the content alone: a copy elsewhere has the same."""
        content = json.dumps(self.messages, sort_keys=True) if self.messages else self.text
        return blake2b(content.encode(), digest_size=8).digest()
