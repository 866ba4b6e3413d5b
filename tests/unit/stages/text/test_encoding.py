from tokenizers.processors import TemplateProcessing

from stages.text.config import DataConfig
from stages.text.documents import Document
from stages.text.sequences import encode_document


def encode(tokenizer, document, **settings):
    encoded = encode_document(document, tokenizer, DataConfig(**settings))
    return tokenizer.decode(encoded.ids), encoded


def test_one_end_of_text_token_if_the_tokenizer_has_one(tokenizer):
    assert encode(tokenizer, Document("f:1", "one two<|endoftext|>"))[0] == "one two<|endoftext|>"
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
