"""The text of a training."""

from stages.text.config import DataConfig, SourceConfig
from stages.train.config import TrainConfig
from stages.train.text import read_text


def test_own_sources_exclude_the_held_out_text_of_the_carve(write_jsonl, tokenizer):
    texts = [f"text number {number}" for number in range(60)]
    carve = write_jsonl("carve.jsonl", [{"text": text} for text in texts[:30]])
    heldout = write_jsonl("heldout.jsonl", [{"text": text} for text in texts[30:40]])
    own = write_jsonl("own.jsonl", [{"text": text} for text in texts[30:]])
    one_each = {"packing": "single", "max_length": 64, "heldout_share": 0.0, "heldout_path": str(heldout)}
    data = DataConfig(kind="text", path=str(carve), **one_each)

    def names(*sources):
        text = read_text(data, TrainConfig(sources=[SourceConfig(path=str(path)) for path in sources]), tokenizer)
        assert sum(len(batch.names) for batch in text.heldout) == 10
        return [sequence.name for sequence in text.train.sequences]

    assert names() == [f"{carve}:{line}" for line in range(1, 31)]
    assert names(own) == [f"{own}:{line}" for line in range(11, 31)]
