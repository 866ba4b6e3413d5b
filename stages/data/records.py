"""Records of a .jsonl file or a dataset to documents."""

from collections.abc import Mapping

from models.errors import DataError
from stages.data.config import DataConfig
from stages.data.document import Document, Message


def read_record(record: object, where: str, data: DataConfig, domain: str = "") -> Document | None:
    """Read the conversation or the text of one record.

    Args:
        record: what the file or the dataset holds.
        where: its name, e.g. `file:line`.
        data: the names of the columns.
        domain: of records that name none of their own.

    Returns:
        The document; None where the text or the conversation is empty or null.

    Raises:
        DataError: neither column is there, or what it holds is no text and no conversation.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"a record is {_kind(record)}, not an object",
            where=where,
            do=f'one JSON object a line: {{"{data.text_column}": "..."}}',
        )
    if data.domain_field:
        domain = _read_domain(record, where, data.domain_field)
    if record.get(data.messages_column) is not None:
        messages = _read_messages(record[data.messages_column], f"{where}, column {data.messages_column}")
        return Document(where, messages=messages, domain=domain) if messages else None
    if data.text_column not in record:
        raise DataError(
            f"a record has neither column {data.messages_column!r} nor column {data.text_column!r}",
            where=f"{where}; its columns: {', '.join(record) or 'none'}",
            do="name the column: data.text_column= or data.messages_column=",
        )
    text = record[data.text_column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(
            f"column {data.text_column!r} holds {_kind(text)}, not text",
            where=where,
            do="name a column of text: data.text_column=",
        )
    return Document(where, _mend_surrogates(text), domain=domain) if text.strip() else None


def _read_domain(record: Mapping[str, object], where: str, field: str) -> str:
    value = record.get(field)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"column {field!r} holds {_kind(value)}, not a name"
        if field in record
        else f"a record has no column {field!r}",
        where=f"{where}; its columns: {', '.join(map(str, record)) or 'none'}",
        do="data.domain_field= a column that every record has, or null",
    )


def _read_messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(
            f"a conversation is {_kind(value)}, not a list",
            where=where,
            do='[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    return tuple(_read_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1))


def _read_message(message: object, where: str) -> Message:
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            "a message needs a role and a content, both text",
            where=where,
            do='{"role": "user", "content": "..."}',
        )
    return {"role": role, "content": _mend_surrogates(content)}


def _mend_surrogates(text: str) -> str:
    """JSON can hold half a surrogate pair, which is no text to a tokenizer: a question mark takes its place."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
