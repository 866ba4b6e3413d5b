"""Settings of the text."""

from dataclasses import dataclass, field, replace

# Settings of one source that mean nothing to another.
FOREIGN_FIELDS = {
    "python_stdlib": ("path", "heldout_path", "name", "subset", "revision", "heldout_split"),
    "text": ("name", "subset", "revision", "heldout_split"),
    "hub": ("path", "heldout_path"),
}
# Settings that mean something to data.labels=generated alone.
GENERATION_FIELDS = ("max_new_tokens", "temperature", "prompt_tokens")


@dataclass
class DataConfig:
    """Where the text comes from, and how it becomes token sequences."""

    # python_stdlib: source and docstrings of this interpreter's standard library; text: local .txt and .jsonl files;
    # hub: a dataset of the Hugging Face hub, or a local folder of one.
    kind: str = "python_stdlib"
    # kind=text: a file, or a folder searched for *.txt and *.jsonl. A .jsonl record is one document; a .txt file is cut
    # at blank lines into documents of about 2 000 characters.
    path: str | None = None
    # kind=text: file or folder of the held-out text; unset: heldout_share of the documents of `path`.
    heldout_path: str | None = None
    # kind=hub: the dataset, e.g. Salesforce/wikitext, or a local folder of data files.
    name: str | None = None
    # kind=hub: configuration of the dataset, e.g. wikitext-2-raw-v1.
    subset: str | None = None
    # kind=hub: branch, tag or commit of the dataset.
    revision: str | None = None
    # kind=hub: the split calibration reads.
    split: str = "train"
    # kind=hub: the split held-out evaluation reads; unset: heldout_share of the documents of `split`.
    heldout_split: str | None = None
    # Field of a record that holds plain text.
    text_column: str = "text"
    # Field of a record that holds a conversation, a list of {"role", "content"}; preferred where both fields exist.
    messages_column: str = "messages"
    # Field of a record that names its text domain; unset: the file, dataset or module it comes from. Domains count
    # where scan.domains asks for them.
    domain_field: str | None = None
    # packed: documents joined and cut every max_length tokens; single: one document per sequence, cut at max_length.
    packing: str = "packed"
    # Tokens that count in the loss. full_sequence: all; completion: the assistant's turns. The calibration text must
    # then be conversations; held-out text that is plain counts in full. generated: the scan reads each prompt with what
    # the model itself writes after it, and only that counts; a prompt is a conversation without its last answer, or the
    # first prompt_tokens of plain text, one document per sequence. Other stages read the text as it stands: the
    # assistant's turns of conversations count, plain text in full.
    labels: str = "full_sequence"
    # labels=generated: the model writes at most this many tokens after each prompt.
    max_new_tokens: int = field(default=64, metadata={"minimum": 1})
    # labels=generated: 0 writes the likeliest token each time; above 0 tokens are drawn, seeded, at this temperature.
    temperature: float = field(default=0.0, metadata={"minimum": 0})
    # labels=generated: the first tokens of a plain-text document that make its prompt.
    prompt_tokens: int = field(default=32, metadata={"minimum": 1})
    # What ends a plain-text document. eos: the tokenizer's end-of-text token; blank_line: documents are paragraphs of
    # one running text (WikiText). Conversations end as their chat template ends them.
    separator: str = "eos"
    # Longest sequence, in tokens.
    max_length: int = 256
    # Calibration tokens, at most.
    tokens: int = 65536
    # Held-out tokens, at most.
    heldout_tokens: int = 32768
    # Share of the documents (python_stdlib: of the modules) that is held out where no held-out text is named.
    heldout_share: float = 0.1

    def unread(self, *, domains: bool) -> dict[str, str]:
        """Settings that nothing reads, and why; `domains`: whether the scan tells text domains apart."""
        found = dict.fromkeys(FOREIGN_FIELDS.get(self.kind, ()), f"data.kind={self.kind}")
        if self.labels != "generated":
            found |= dict.fromkeys(GENERATION_FIELDS, f"data.labels={self.labels}")
        return found if domains else found | {"domain_field": "scan.domains=false"}


def calibration_only(data: DataConfig) -> DataConfig:
    """The settings as far as the calibration text goes.

    How much held-out text is read has no part in it; a local file that holds it has: its documents are left out.
    """
    named = {"text": data.heldout_path, "hub": data.heldout_split}.get(data.kind) is not None
    share = 0.0 if named else data.heldout_share
    return replace(data, heldout_split=None, heldout_tokens=0, heldout_share=share)
