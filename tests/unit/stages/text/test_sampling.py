import torch

from stages.text.generated import SeededSampling

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])


def draw(numbers, *, temperature=0.7, seed=4, width=9, logits=LOGITS):
    sampling = SeededSampling(numbers, temperature=temperature, seed=seed, prompt_length=6)
    ids = torch.zeros(len(numbers), width).long()
    return sampling(ids, logits.expand(len(numbers), -1)).argmax(dim=1)


def test_draws_follow_the_softmax_at_the_temperature():
    draws = draw(range(20_000))
    shares = torch.bincount(draws, minlength=5) / 20_000
    expected = (LOGITS / 0.7).softmax(0)
    # Four standard deviations of a share.
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_a_draw_depends_on_seed_prompt_and_step_alone():
    numbers = list(range(50))
    draws = draw(numbers)
    assert draw(numbers[::-1]).flip(0).equal(draws)
    assert draw(numbers[13:20]).equal(draws[13:20])
    assert not draw(numbers, seed=5).equal(draws)
    assert not draw(numbers, width=10).equal(draws)
    assert not draw([number + 50 for number in numbers]).equal(draws)


def test_a_tiny_temperature_draws_the_likeliest():
    assert draw(range(50), temperature=1e-30).tolist() == [2] * 50


def test_the_state_of_torch_is_left_alone():
    before = torch.get_rng_state()
    draw(range(3))
    assert torch.get_rng_state().equal(before)


def test_impossible_tokens_stay_impossible():
    logits = LOGITS.clone()
    logits[2] = -torch.inf
    assert 2 not in draw(range(200), temperature=5.0, logits=logits).tolist()
