"""What clients are asked to do."""

from types import SimpleNamespace

from pipeline import client_process


def test_an_output_longer_than_the_prompt_repeats_its_tokens():
    decoded = []
    model = object.__new__(client_process._LlamaModel)
    model.context = lambda *, exact: exact
    model.api = SimpleNamespace(llama_memory_clear=lambda *_: None, llama_get_memory=lambda _: None)
    model.decode = lambda _context, ids, start: decoded.append((list(ids), start))
    _read, write = model.clocks([5, 6, 7], 4)
    write()
    assert decoded == [([5, 6, 7], 0), ([5], 3), ([6], 4), ([7], 5), ([5], 6)]
