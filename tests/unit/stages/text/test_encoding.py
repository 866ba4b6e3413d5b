from tokenizers.processors import TemplateProcessing

from stages.text.config import DataConfig
from stages.text.documents import Document
from stages.text.sequences import encode_document


def encode(tokenizer, document, **settings):
    encoded = encode_document(document, tokenizer, DataConfig(**settings))
    return tokenizer.decode(encoded.ids), encoded


def test_text_counts_in_full_and_ends_in_the_end_of_text_token(tokenizer):
    text, encoded = encode(tokenizer, Document("f:1", "one two"))
    assert text == "one two<|endoftext|>"
    assert encoded.labels == encoded.ids
    assert encoded.name == "f:1"


def test_an_end_of_text_token_that_is_there_is_not_doubled(tokenizer):
    assert encode(tokenizer, Document("f:1", "one two<|endoftext|>"))[0] == "one two<|endoftext|>"


def test_a_tokenizer_without_an_end_of_text_token_adds_none(tokenizer):
    tokenizer.eos_token = None
    assert encode(tokenizer, Document("f:1", "one two"))[0] == "one two"


def test_a_beginning_token_precedes_documents_but_not_paragraphs(tokenizer):
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert encode(tokenizer, Document("f:1", "one"))[0] == "<|endoftext|>one<|endoftext|>"
    assert encode(tokenizer, Document("f:1", "one"), separator="blank_line")[0] == "one\n\n"


def test_conversations_end_as_their_template_ends_them(tokenizer, conversation):
    text, _ = encode(tokenizer, Document("f:1", messages=tuple(conversation[:2])), separator="blank_line")
    assert text == "<|user|>\nWhat is a lobster?\n<|assistant|>\nA crustacean.<|endoftext|>"


def test_completion_masks_all_but_the_answers(tokenizer, conversation):
    _, encoded = encode(tokenizer, Document("f:1", messages=tuple(conversation[:2])), labels="completion")
    kept = [label for label in encoded.labels if label != -100]
    assert tokenizer.decode(kept) == "A crustacean.<|endoftext|>"
    assert all(label in {id_, -100} for id_, label in zip(encoded.ids, encoded.labels, strict=True))
