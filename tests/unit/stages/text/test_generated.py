import logging
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Barrier, Thread

import pytest
import torch
from numerics.quantised_models import plain_twin
from pico import write_pico
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from instruments.errors import DataError
from models.config import ModelConfig
from models.loading import is_offloaded, load_dense
from models.source import EMBEDDED
from stages.artifacts.job import Workers
from stages.text.batches import TokenSequence
from stages.text.config import DataConfig, SourceConfig
from stages.text.generated import continue_prompts, decode_behind, find_ends, load_prompts, write_continuations
from stages.text.sequences import LoadedText

GREEDY, SAMPLED = DataConfig(max_new_tokens=7), DataConfig(max_new_tokens=7, temperature=1.5)
PROMPTS = [[9, 8, 7, 6, 5], [12], [3, 4, 5], [50, 40, 30, 20], [11, 13]]
DATA = DataConfig(labels="generated", tokens=140, max_length=40, prompt_tokens=11, max_new_tokens=6)


def read_prompts(path, tokenizer, **settings):
    settings = {"max_length": 64, "max_new_tokens": 16, "prompt_tokens": 6, "heldout_share": 1e-9} | settings
    return load_prompts(DataConfig(kind="text", path=str(path), labels="generated", **settings), tokenizer)


def ask(question, *answers):
    answered = [{"role": "assistant", "content": answer} for answer in answers]
    return {"messages": [{"role": "user", "content": question}, *answered]}


def test_prompts_of_conversations_and_of_plain_text(write_jsonl, tokenizer):
    """Plain text gives its first tokens and no end."""
    long = "one two three four five six seven eight nine ten"
    path = write_jsonl("a.jsonl", [ask("How?", "So."), {"text": long}, {"text": "two"}, ask("When?")])
    text = read_prompts(path, tokenizer)
    assert [prompt.name for prompt in text.sequences] == [f"{path}:{number}" for number in range(1, 5)]
    assert [tokenizer.decode(prompt.ids) for prompt in text.sequences] == [
        "<|user|>\nHow?\n<|assistant|>\n",
        tokenizer.decode(tokenizer(long)["input_ids"][:6]),
        "two",
        "<|user|>\nWhen?\n<|assistant|>\n",
    ]
    assert all(prompt.labels == [-100] * len(prompt.ids) for prompt in text.sequences)
    assert text.skipped == {}
    assert tokenizer.decode(read_prompts(path, tokenizer, separator="blank_line").sequences[2].ids) == "two\n\n"


@pytest.mark.parametrize("separator", ["eos", "blank_line"])
def test_prompts_start_with_the_begin_token_of_the_tokenizer(write_jsonl, tokenizer, separator):
    """Like Gemma and Llama; the chat template of the tests writes none."""
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", begin)])
    path = write_jsonl("a.jsonl", [ask("How?", "So."), {"text": "one two three four five six seven eight"}])
    asked, plain = read_prompts(path, tokenizer, separator=separator).sequences
    assert tokenizer.decode(asked.ids) == "<|endoftext|><|user|>\nHow?\n<|assistant|>\n"
    assert plain.ids == tokenizer("one two three four five six seven")["input_ids"][:6]
    assert plain.ids.count(begin) == 1


def test_what_makes_no_prompt_is_counted_and_named(write_jsonl, tokenizer):
    unasked = {"messages": [{"role": "assistant", "content": "So."}]}
    path = write_jsonl("a.jsonl", [unasked, ask("How? " * 40, "So."), ask("How?", "So."), unasked])
    text = read_prompts(path, tokenizer)
    assert [prompt.name for prompt in text.sequences] == [f"{path}:3"]
    assert text.skipped == {
        "no text before the answer": [f"{path}:1", f"{path}:4"],
        "the prompt leaves data.max_length no room for an answer": [f"{path}:2"],
    }
    with pytest.raises(DataError) as caught:
        read_prompts(write_jsonl("b.jsonl", [unasked, ask("How? " * 40)]), tokenizer)
    assert caught.value.do == "conversations that begin with a question, or a larger data.max_length"


def test_prompts_and_answers_of_a_mixture_have_the_shares_of_their_sources(write_jsonl, tokenizer):
    long = write_jsonl("long.jsonl", [ask(f"Why is number {number} so much larger?" * 4) for number in range(50)])
    short = write_jsonl("short.jsonl", [{"text": f"number {number}"} for number in range(500)])
    sources = [SourceConfig(path=str(path), share=share) for path, share in ((long, 0.75), (short, 0.25))]
    mixed = {"kind": "mixture", "sources": sources, "tokens": 3000, "max_length": 99, "prompt_tokens": 3}
    prompts = load_prompts(replace(DATA, heldout_share=1e-9, **mixed), tokenizer).sequences
    tokens = dict.fromkeys((str(long), str(short)), 0)
    for prompt in prompts:
        tokens[prompt.source] += len(prompt.ids) + DATA.max_new_tokens
        assert abs(tokens[str(short)] - 0.25 * sum(tokens.values())) < 60
        if sum(tokens.values()) > 1500:
            return
    pytest.fail("too few prompts")


def test_no_more_prompts_than_could_be_wanted(write_jsonl, tokenizer):
    path = write_jsonl("a.jsonl", [{"text": f"document number {number} of many"} for number in range(50)])
    prompts = read_prompts(path, tokenizer, tokens=65).sequences
    assert sum(len(prompt.ids) for prompt in prompts[:-1]) < 65 <= sum(len(prompt.ids) for prompt in prompts)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request, tmp_path_factory):
    folder = write_pico(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write(model, data=GREEDY, *, ends=(), seed=0, prompts=PROMPTS):
    return write_continuations(model, prompts, data, ends, 0, seed=seed)


@torch.no_grad()
def write_one_by_one(model, prompt, count, ends):
    """Greedy decoding without cache, padding or batch."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    written = ids[len(prompt) :]
    return [] if written[0] in ends else written


def test_greedy_writing_is_the_likeliest_token_each_time(model):
    expected = [write_one_by_one(model, prompt, 7, ()) for prompt in PROMPTS]
    assert write(model) == expected
    # Each of these tokens ends its text, the first at once; the other texts of the batch continue.
    ends = {expected[0][0], expected[1][3], expected[2][2]}
    expected = [write_one_by_one(model, prompt, 7, ends) for prompt in PROMPTS]
    assert len(set(map(len, expected))) > 1
    assert write(model, ends=ends) == expected
    for batch in ([0], [2, 1], [4, 3, 0]):
        part = [PROMPTS[number] for number in batch]
        assert write(model, ends=ends, prompts=part) == [expected[number] for number in batch]


def test_the_head_reads_contiguous_states(model):
    """Else torch copies its weight for every prompt: on a CPU in bfloat16 a minute for 37 prompts of a 0.5B."""
    read = []
    with model.get_output_embeddings().register_forward_hook(lambda _, args, __: read.append(args[0].is_contiguous())):
        write_continuations(model, PROMPTS, GREEDY, {0}, 0, seed=0)
    assert read == [True] * GREEDY.max_new_tokens


def test_draws_depend_on_the_seed_alone_and_leave_torch_as_it_was(model):
    before = torch.get_rng_state()
    drawn = write(model, SAMPLED, seed=3)
    assert torch.get_rng_state().equal(before)
    assert drawn == write(model, SAMPLED, seed=3)
    assert drawn != write(model, SAMPLED, seed=4)
    assert drawn != write(model)


def test_draws_follow_the_softmax_of_all_tokens_at_the_temperature(model):
    data = DataConfig(max_new_tokens=1, temperature=0.7)
    drawn = torch.tensor(write(model, data, prompts=[[9, 8, 7]] * 4000, seed=1))
    with torch.no_grad():
        expected = (model(torch.tensor([[9, 8, 7]])).logits[0, -1] / 0.7).softmax(0)
    shares = torch.bincount(drawn[:, 0], minlength=len(expected)) / 4000
    # The bound is five standard deviations of a share.
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def test_settings_of_the_checkpoint_do_not_steer_what_is_written(model):
    expected = write(model)
    own = model.generation_config
    changed = {"do_sample": True, "temperature": 9.0, "top_k": 3, "repetition_penalty": 5.0, "max_length": 3}
    saved = {name: getattr(own, name) for name in changed}
    try:
        own.update(**changed, suppress_tokens=[expected[0][0]])
        assert write(model) == expected
        assert model.generation_config is own
    finally:
        own.update(**saved, suppress_tokens=None)


@pytest.mark.parametrize(
    ("stated", "own", "ends"), [([7, 5], "<|endoftext|>", {0, 5, 7}), (4, None, {4}), (None, None, set())]
)
def test_ends_of_checkpoint_and_tokenizer(model, tokenizer, monkeypatch, stated, own, ends):
    monkeypatch.setattr(model.generation_config, "eos_token_id", stated)
    tokenizer.eos_token = own
    assert find_ends(model, tokenizer) == ends


@pytest.mark.parametrize(
    "settings", [{"quantization": "nf4"}, {"device_map": "auto", "cpu_memory": "60KB"}], ids=["4 bits", "offloaded"]
)
def test_a_model_in_4_bits_or_on_disk_writes_what_its_plain_twin_writes(tmp_path, settings):
    folder = write_pico(tmp_path, "qwen3", hidden=40, intermediate=72, layers=3)
    model = load_dense(ModelConfig(kind="local", path=str(folder), device="cpu", **settings), folder)
    assert is_offloaded(model) == ("device_map" in settings)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert write(model) == write(plain if is_offloaded(model) else plain_twin(model, folder))


@pytest.fixture(scope="module")
def embedded_model():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


LENGTHS = (5, 9, 3, 11, 7, 2, 8, 4, 6, 10, 5, 12, 3, 9, 7, 6)
ROWS = [[17 * number + 5 * place + 7 for place in range(length)] for number, length in enumerate(LENGTHS)]


def named(*prompts, **skipped):
    return LoadedText([TokenSequence(f"p{ids}", ids, [-100] * len(ids)) for ids in prompts], skipped)


MANY = named(*ROWS, dull=["x"])


def go_on(model, tokenizer, prompts=MANY, data=DATA, **options):
    return continue_prompts(model, tokenizer, prompts, data, **({"seed": 0, "batch_tokens": 70} | options))


def test_only_what_was_written_counts(embedded_model, tokenizer):
    text = go_on(embedded_model, tokenizer)
    # The remaining tokens are too few for the next prompt and one label.
    assert 0 < 140 - text.tokens <= LENGTHS[len(text.sequences)]
    for prompt, sequence in zip(ROWS, text.sequences, strict=False):
        assert sequence.name == f"p{prompt}"
        assert sequence.ids[: len(prompt)] == prompt
        assert sequence.labels == [-100] * len(prompt) + sequence.ids[len(prompt) :]
        assert len(sequence.ids) <= len(prompt) + 6
    assert text.skipped["dull"] == ["x"]


def test_the_model_finds_what_it_wrote_likely(embedded_model, tokenizer):
    """With teacher forcing on its greedy text, the model gives every labelled token the highest logit."""
    text = go_on(embedded_model, tokenizer, load_prompts(DATA, tokenizer))
    for sequence in text.sequences:
        with torch.no_grad():
            logits = embedded_model(torch.tensor([sequence.ids])).logits[0, :-1]
        labels = torch.tensor(sequence.labels[1:])
        assert logits.argmax(1)[labels != -100].equal(labels[labels != -100])


def test_greedy_text_does_not_depend_on_the_batches_and_drawn_text_on_nothing_but_the_seed(embedded_model, tokenizer):
    """A resumed scan generates its text again and relies on equal batches."""
    few, drawn = replace(DATA, tokens=90), replace(DATA, temperature=1.0)
    texts = [go_on(embedded_model, tokenizer, data=few, batch_tokens=size).sequences for size in (1, 40, 70, 1000)]
    assert all(text == texts[0] for text in texts)
    text = go_on(embedded_model, tokenizer, data=drawn, seed=3)
    torch.rand(1)
    assert go_on(embedded_model, tokenizer, data=drawn, seed=3) == text
    assert go_on(embedded_model, tokenizer, data=drawn, seed=4) != text


def test_an_interrupted_text_goes_on_behind_its_last_whole_batch(embedded_model, tokenizer, tmp_path, monkeypatch):
    file, expected, written = tmp_path / "written.jsonl", go_on(embedded_model, tokenizer), []

    def interrupted(model, batch, *args, **options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(batch)
        return write_continuations(model, batch, *args, **options)

    monkeypatch.setattr("stages.text.generated.write_continuations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go_on(embedded_model, tokenizer, file=file)
    with file.open("a") as torn:
        torn.write("[[1, 2")
    monkeypatch.setattr("stages.text.generated.write_continuations", lambda *args, **options: (
        written.append(args[1]), write_continuations(*args, **options)
    )[1])  # fmt: skip
    assert go_on(embedded_model, tokenizer, file=file) == expected
    assert written[2] not in written[:2]
    assert go_on(embedded_model, tokenizer, file=file, batch_tokens=40) == expected


@dataclass(frozen=True)
class Threads(Workers):
    """Workers as threads of this process."""

    board: tuple = ()
    meeting: Barrier | None = None

    def gather(self, value):
        self.board[self.rank].append(value)
        self.meeting.wait()
        values = [values[-1] for values in self.board]
        self.meeting.wait()
        return values


@pytest.mark.parametrize("world", [2, 3])
def test_the_text_does_not_depend_on_the_workers(embedded_model, tokenizer, world):
    expected = go_on(embedded_model, tokenizer)
    board, meeting = tuple([] for _ in range(world)), Barrier(world, timeout=60)
    found, models = {}, [deepcopy(embedded_model) for _ in range(world)]

    def work(rank):
        found[rank] = go_on(models[rank], tokenizer, workers=Threads(rank, world, rank, world, board, meeting))

    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(world), expected)
    assert all(sum(map(len, parts)) > 0 for parts in board), "every worker wrote a part of it"


@pytest.fixture(scope="module")
def ending_model(tmp_path_factory):
    """A model whose next token depends on the last token alone; after tokens 100 to 199 the text ends."""
    folder = write_pico(tmp_path_factory.mktemp("ending"), "qwen3", tokenizer=True, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # After tokens 100 to 199 the end has logit 0 and all others have negative logits.
        model.lm_head.weight.fill_(-1.0)
        model.lm_head.weight[0] = 0.0
        model.lm_head.weight[300] = 2.0
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)  # token 300 follows all other tokens
        model.model.embed_tokens.weight[100:200] = -1.0
        model.model.embed_tokens.weight[100:200, 1:] = 0.0
        model.model.embed_tokens.weight[100:200, 0] = 1.0
        model.lm_head.weight[300, 0] = -1.0
    return model, AutoTokenizer.from_pretrained(folder)


def test_a_prompt_after_which_nothing_is_written_is_counted_and_named(ending_model, caplog):
    with caplog.at_level(logging.WARNING):
        text = go_on(*ending_model, named([5, 120], [5, 6, 7], [150]))
    assert [sequence.ids for sequence in text.sequences] == [[5, 6, 7] + [300] * 6]
    assert text.skipped == {"the model ended the text at once": ["p[5, 120]", "p[150]"]}
    assert len(caplog.messages) == 1
    with pytest.raises(DataError) as caught:
        go_on(*ending_model, named([5, 120], [150]))
    assert caught.value.do == "prompts that call for an answer"


def test_the_space_behind_a_prompt_stays_where_a_decoder_drops_the_first():
    """As Llama 2's, Mistral's and TinyLlama's tokenizer.json do."""
    backend = Tokenizer(models.BPE(vocab={"▁one": 0, "▁two": 1, "</s>": 2}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer.decode([1]) == "two"
    assert decode_behind(tokenizer, [0], [1, 2]) == " two"
    assert decode_behind(tokenizer, [0], []) == ""


def test_a_character_that_a_prompt_begins_is_text():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer, ids = PreTrainedTokenizerFast(tokenizer_object=backend), [256, *"你好".encode()]
    assert decode_behind(tokenizer, ids[:3], ids[3:]) == "你好"
