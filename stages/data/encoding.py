"""Documents to token ids and labels."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from stages.data.chat import encode_conversation
from stages.data.config import DataConfig
from stages.data.document import Document

# The label the loss leaves out, as in torch.nn.functional.cross_entropy.
IGNORED = -100
# Values of data.labels under which only the assistant's turns of a conversation count.
ANSWERS_COUNT = ("completion", "generated")


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids and labels of equal length; a label is the id at its own position, or IGNORED."""

    name: str
    ids: list[int]
    labels: list[int]
    domain: str = ""


def encode_document(document: Document, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> EncodedDocument:
    """Tokenize one document, its end included.

    Raises:
        DataError: the conversation cannot be rendered or labelled.
    """
    if document.messages:
        ids, supervised = encode_conversation(document, tokenizer, completion=data.labels in ANSWERS_COUNT)
        labels = [id_ if counts else IGNORED for id_, counts in zip(ids, supervised, strict=True)]
        return EncodedDocument(document.name, ids, labels, document.domain)
    ids = encode_text(document.text, tokenizer, data.separator)
    return EncodedDocument(document.name, ids, ids, document.domain)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Tokenize plain text and end it.

    A document of its own gets what the tokenizer puts around one (Llama: a beginning token) and the end-of-text token;
    a paragraph of a running text gets a blank line.
    """
    if separator == "blank_line":
        return list(tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"])
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids
