import pytest

from stages.layers.choice import choose_dense_layers

# Halving all 6 layers costs 0.16. Two dense layers leave 0.25 to the others, where a layer of cost 0.01 costs 0.02.
COSTS = [[0.07, 0.01, 0.02, 0.01, 0.01, 0.04], [0.14, 0.0141, 0.0282, 0.0141, 0.0141, 0.05]]


@pytest.mark.parametrize(("able", "chosen"), [("any", [0, 5]), ("ends", [0, 5]), ("first", [0]), ("none", [])], ids=str)
def test_layers_of_highest_cost_stay_dense_where_the_target_can_keep_them(able, chosen):
    assert choose_dense_layers(COSTS, 0.5, able) == chosen


def test_inner_layers_need_a_target_for_any():
    moved = [[row[2], *row[1:2], row[0], *row[3:]] for row in COSTS]  # the first layer's cost is now the third's
    assert choose_dense_layers(moved, 0.5, "any") == [2, 5]
    assert choose_dense_layers(moved, 0.5, "ends") == []


@pytest.mark.parametrize("able", ["any", "ends", "first"])
def test_no_layer_stays_dense_if_the_others_would_lose_more(able):
    """As on the embedded model, where the cost of four equal layers doubles from a half to three eighths."""
    assert choose_dense_layers([[0.04] * 4, [0.08] * 4], 0.5, able) == []


def test_a_layer_without_cost_is_no_error_and_one_layer_is_carved():
    assert choose_dense_layers([[0.0, 0.5], [0.0, 1.0]], 0.75, "any") == [1]
    assert choose_dense_layers([[0.5], [1.0]], 1.0, "any") == []


def test_others_keep_at_least_half_of_the_share():
    steep = [[1.0, *[1e-9] * 5], [2.0, *[1e-9] * 5]]
    assert choose_dense_layers(steep, 0.3, "any") == [0]
    assert choose_dense_layers(steep, 0.25, "any") == []  # (0.25 · 6 − 1) / 5 = 0.1


# Costs × 10,000 of Qwen2.5-Coder-0.5B's layers, on too few tokens.
QWEN = (
    "1339 308 327 549 366 313 312 300 277 214 160 182 238 161 168 226 344 231 238 356 590 562 431 1059",
    "2163 479 385 713 533 425 411 444 369 302 232 228 330 254 238 353 506 375 308 529 873 789 599 1358",
)


def test_a_layer_that_saves_less_than_the_error_does_not_stay_dense():
    """Layers 3, 20 and 21, too, would lower the predicted sum, by 4 % in all."""
    assert choose_dense_layers([[*map(float, row.split())] for row in QWEN], 0.5, "any") == [0, 23]
