from copy import deepcopy

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM

from stages.losses import enable_gradient_checkpointing
from stages.text.config import DataConfig
from stages.text.generated import find_ends, write_continuations

GREEDY = DataConfig(max_new_tokens=7)
SAMPLED = DataConfig(max_new_tokens=7, temperature=1.5)
PROMPTS = [[9, 8, 7, 6, 5], [12], [3, 4, 5], [50, 40, 30, 20], [11, 13]]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request, tmp_path_factory):
    folder = write_pico(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write(model, data=GREEDY, *, ends=(), seed=0):
    return write_continuations(model, PROMPTS, data, ends, 0, seed=seed)


@torch.no_grad()
def write_one_by_one(model, prompt, count, ends):
    """Greedy decoding without cache, padding or batch."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


def test_greedy_writing_is_the_likeliest_token_each_time(model):
    expected = [write_one_by_one(model, prompt, 7, ()) for prompt in PROMPTS]
    assert write(model) == expected
    # Each of these tokens ends its text; the other texts of the batch continue.
    ends = {expected[0][0], expected[1][3], expected[2][2]}
    expected = [write_one_by_one(model, prompt, 7, ends) for prompt in PROMPTS]
    assert len(set(map(len, expected))) > 1
    assert write(model, ends=ends) == expected


def test_greedy_writing_does_not_depend_on_the_batch(model):
    together = write(model, ends={2})
    for batch in ([0], [2, 1], [4, 3, 0]):
        part = [PROMPTS[number] for number in batch]
        assert write_continuations(model, part, GREEDY, {2}, 60, seed=0) == [together[number] for number in batch]


def test_draws_depend_on_the_seed_alone_and_leave_torch_as_it_was(model):
    before = torch.get_rng_state()
    drawn = write(model, SAMPLED, seed=3)
    assert torch.get_rng_state().equal(before)
    assert drawn == write(model, SAMPLED, seed=3)
    assert drawn != write(model, SAMPLED, seed=4)
    assert drawn != write(model)


def test_draws_follow_the_softmax_of_all_tokens_at_the_temperature(model):
    data = DataConfig(max_new_tokens=1, temperature=0.7)
    drawn = torch.tensor(write_continuations(model, [[9, 8, 7]] * 4000, data, (), 0, seed=1))
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
        assert own.repetition_penalty == 5.0
    finally:
        own.update(**saved, suppress_tokens=None)


def test_recomputing_layers_write_with_their_cache_and_stay_as_they_were(model):
    expected = write(model)
    model = deepcopy(model)
    enable_gradient_checkpointing(model)
    lengths = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    assert write(model) == expected
    assert lengths == [5, 1, 1, 1, 1, 1, 1]
    assert [layer.training for layer in model.get_decoder().layers] == [True, True]
    assert not model.training


@pytest.mark.parametrize(
    ("stated", "own", "ends"), [([7, 5], "<|endoftext|>", {0, 5, 7}), (4, None, {4}), (None, None, set())]
)
def test_ends_of_checkpoint_and_tokenizer(model, tokenizer, monkeypatch, stated, own, ends):
    monkeypatch.setattr(model.generation_config, "eos_token_id", stated)
    tokenizer.eos_token = own
    assert find_ends(model, tokenizer) == ends
