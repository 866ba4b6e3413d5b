"""Dense models of every type in transformers are carved exactly, all experts on, or refused with a reason."""

import pytest
import torch
from zoo.carves import MISSING, NATIVE, OWN, REFUSED, Zoo, problems
from zoo.checkpoints import CARVED, KEYS, UNBUILT, VARIANTS, build, names_of_types
from zoo.next_month import MODEL_TYPE

TYPES = names_of_types()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory, text):
    zoo = Zoo(tmp_path_factory.mktemp("zoo"), text)
    yield zoo
    zoo.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_carved_exactly_or_refused(zoo, name):
    found = zoo.examine(name)
    if found.outcome == MISSING:
        pytest.skip(found.reason)
    expected = {NATIVE: CARVED["natively"], OWN: CARVED["as_tiny_onn"]}
    outcome = next((outcome for outcome, names in expected.items() if name in names), REFUSED)
    assert found.outcome == outcome, found
    assert found.reason or outcome != REFUSED, found


def test_the_tables_name_types_that_exist():
    types = {name.removesuffix("_image") for name in TYPES}
    assert UNBUILT.keys() <= {*TYPES}
    assert {*TYPES} - UNBUILT.keys() >= {name for names in CARVED.values() for name in names}
    assert MODEL_TYPE in CARVED["as_tiny_onn"]
    assert {name.removesuffix("_image") for name in KEYS} <= types
    assert {model_type for model_type, _ in VARIANTS.values()} <= types


@pytest.mark.parametrize("name", ["next_month", "gemma2", "qwen3_5_text"])
def test_checkpoints_are_language_models(name):
    """Tokens after the end, and a cache, change nothing before it; the logits are of a useful size."""
    model = build(name)
    ids = torch.randint(64, 4000, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        start = model(input_ids=ids[:, :33], use_cache=True)
        rest = model(input_ids=ids[:, 33:], cache=start.cache).logits
    torch.testing.assert_close(start.logits, whole[:, :33], rtol=0, atol=1e-4)
    torch.testing.assert_close(rest, whole[:, 33:], rtol=0, atol=1e-4)
    assert 0.5 < whole.std() < 5


def test_problems_of_a_carve_are_found():
    sound = {
        "loading": {},
        "difference": 1e-6,
        "generated": True,
        "copied": (3, 3),
        "without_experts": 2.0,
        "image": 1e-6,
        "image_generated": 1e-6,
    }
    assert problems(sound) == []
    for key, value in {
        "loading": {"missing_keys": ["a"]}, "difference": float("inf"), "generated": float("inf"), "copied": (2, 3),
        "without_experts": 0.0, "image": 0.1, "image_generated": float("inf"),
    }.items():  # fmt: skip
        assert len(problems(sound | {key: value})) == 1, key
