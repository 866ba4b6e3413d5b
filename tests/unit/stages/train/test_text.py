import json
from itertools import chain

from pico import write_pico

from models.config import ModelConfig
from models.loading import load_tokenizer
from stages.artifacts.job import Job
from stages.text.config import DataConfig, SourceConfig
from stages.train.config import TrainConfig
from stages.train.text import read_text


def test_of_a_mixture_the_dense_model_answers_the_conversations_and_other_text_stays(tmp_path):
    folder = write_pico(tmp_path / "pico", "qwen3", tokenizer=True)
    tokenizer, model = load_tokenizer(folder, trust_remote_code=False), ModelConfig(kind="local", path=str(folder))
    question = {"role": "user", "content": "How?"}
    records = [{"messages": [question, {"role": "assistant", "content": f"So {place}."}]} for place in range(20)]
    files = {"chats": records, "more": records, "plain": [{"text": "one two three four five " * 4}] * 20}
    for name, found in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in found))
    (tmp_path / "heldout.txt").write_text("one two three")
    known = {"max_length": 32, "heldout_path": str(tmp_path / "heldout.txt"), "heldout_share": 0.0}

    def read(packing, *names):
        places = [str(tmp_path / f"{name}.jsonl") for name in names]
        sources = [SourceConfig(share=1 / len(places), path=path) for path in places]
        data = DataConfig(kind="mixture", sources=sources, packing=packing, **known)
        job = Job({}, tmp_path, tmp_path / "-".join([packing, *names]))
        train = TrainConfig(tokens=240, own_answers=5, heldout_sequences=1)
        text, again = (read_text(job, model, folder, data, train, tokenizer, 0).train for _ in range(2))
        assert text == again  # kept
        return [[sequence for sequence in text.sequences if sequence.source in {"", path}] for path in places]

    *own, rest = read("single", "chats", "more", "plain")
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    for sequence in (sequence for found in own for sequence in found[:-1]):  # the last is cut
        assert sequence.ids[: len(prompt)] == prompt
        assert sequence.labels == [-100] * len(prompt) + sequence.ids[len(prompt) :]
        assert 1 <= len(sequence.ids) - len(prompt) <= 5
    assert all(sequence.labels == sequence.ids for sequence in rest)
    counts = [sum(len(sequence.ids) for sequence in found) for found in (*own, rest)]
    assert all(abs(count - 80) <= 32 for count in counts), counts
    *packed, _ = read("packed", "chats", "more", "plain")
    for singles, packs in zip(own, packed, strict=True):
        for part in ("ids", "labels"):
            ours, theirs = ([*chain.from_iterable(getattr(one, part) for one in found)] for found in (packs, singles))
            assert ours == theirs
        assert {len(one.ids) for one in packs[:-1]} == {32}
    (continued,) = read("single", "plain")
    assert continued
    assert all(sequence.labels != sequence.ids for sequence in continued)
