from pico import write_pico

from models.config import ModelConfig
from models.loading import load_tokenizer
from stages.artifacts.job import Job
from stages.text.config import DataConfig, SourceConfig
from stages.train.config import TrainConfig
from stages.train.text import read_text


def test_of_a_mixture_the_dense_model_answers_the_conversations_and_other_text_stays(tmp_path, write_jsonl):
    folder = write_pico(tmp_path / "pico", "qwen3", tokenizer=True)
    tokenizer, model = load_tokenizer(folder, trust_remote_code=False), ModelConfig(kind="local", path=str(folder))
    question = {"role": "user", "content": "How?"}
    records = [{"messages": [question, {"role": "assistant", "content": f"So {place}."}]} for place in range(20)]
    chats, more = write_jsonl("chats.jsonl", records), write_jsonl("more.jsonl", records)
    plain = write_jsonl("plain.jsonl", [{"text": "one two three four five " * 4}] * 20)
    own, rest = [("chats", chats), ("more", more)], [("plain", plain)]

    def read(*places):
        sources = [SourceConfig(share=1 / len(places), path=str(path)) for _, path in places]
        data = DataConfig(kind="mixture", sources=sources, max_length=32, heldout_path=str(plain), heldout_share=0.0)
        job = Job({}, tmp_path, tmp_path / "-".join(name for name, _ in places))
        train = TrainConfig(tokens=240, own_answers=5, heldout_sequences=1)
        return [read_text(job, model, folder, data, train, tokenizer, 0).train for _ in range(2)]

    text, again = read(*own, *rest)
    assert text == again  # kept
    by_source = {str(path): [one for one in text.sequences if one.source == str(path)] for _, path in (*own, *rest)}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    for _, path in own:
        for sequence in by_source[str(path)]:
            assert sequence.ids[: len(prompt)] == prompt
            assert sequence.labels == [-100] * len(prompt) + sequence.ids[len(prompt) :]
            assert 1 <= len(sequence.ids) - len(prompt) <= 5
    assert all(sequence.labels == sequence.ids for sequence in by_source[str(plain)])
    counts = [sum(len(one.ids) for one in found) for found in by_source.values()]
    assert all(abs(count - 80) <= 32 for count in counts), counts
    alone, _ = read(*rest)
    assert all(sequence.labels != sequence.ids for sequence in alone.sequences)  # continued
