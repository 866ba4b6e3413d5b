"""`cache_check`: exact hits of caches, bytes of every target, and refused inputs."""

import numpy as np
import pytest
from unit.pipeline.served_carves import write_carve

from models.source import EMBEDDED, read_config
from models.targets.config import MOE_TARGETS, target_of
from pipeline import cache_check
from pipeline.cache_check import Trace, ffn_bytes, recency_ranks, render

L, T, E, K = 3, 90, 7, 2
N, D, EXPERTS, LAYERS = 32, 64, 5, 2


def draw():
    """Experts of skewed frequency, often those of the token before."""
    rng = np.random.default_rng(0)
    chosen = np.empty((L, T, K), dtype=np.int64)
    for layer in range(L):
        for token in range(T):
            again = token and rng.random() < 0.4
            drawn = rng.choice(E, K, replace=False, p=np.arange(1, E + 1) / (E * (E + 1) / 2))
            chosen[layer, token] = chosen[layer, token - 1][::-1] if again else drawn
    return chosen


def count_by_loop(chosen_TK, size):
    """Hits of an LRU cache, which serves all experts of a token before any of them is moved."""
    cache, hits = [], []
    for experts in chosen_TK.tolist():
        hits.append([expert in cache for expert in experts])
        cache = experts + [expert for expert in cache if expert not in experts]
        del cache[size:]
    return np.array(hits)


@pytest.mark.parametrize("size", [*range(K, E + 1)])
def test_hits_are_those_of_a_plain_lru_cache(size):
    for chosen_TK in draw():
        assert ((recency_ranks(chosen_TK, E) < size) == count_by_loop(chosen_TK, size)).all()


def test_rates_are_of_the_second_half():
    chosen = draw()
    found = Trace(chosen, E, 1).hits([0, 3, E])
    assert found == [0.0, pytest.approx(np.mean([count_by_loop(each, 3)[T // 2 :] for each in chosen])), 1.0]


def test_the_layers_of_a_pool_share_one_cache():
    chosen = draw()
    pooled = chosen.swapaxes(0, 1).reshape(1, -1, K)
    (row,) = [
        line for line in render(Trace(pooled, E, L), (E << 20, 0, 9 << 20, "BF16"), [4]).splitlines() if "| 4" in line
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    hits = count_by_loop(pooled[0], 4)[L * T // 2 :].mean()
    assert cells[1:3] == ["4.0 MiB", f"{hits:.1%}"]
    assert cells[3] == f"{L * K * (1 - hits):.1f} MiB"
    assert cells[4:] == ["5.0 MiB", f"{5 / (L * K * (1 - hits)):.2f}"]


TARGETS = [("qwen2_moe", "qwen2", 64), ("tiny_onn", "qwen3", 64), ("mixtral", "llama", 0),
           ("granitemoeshared", "granite", 64), ("glm4_moe", "llama", 64)]  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS, ids=lambda case: case[0])
def carve(request, tmp_path_factory):
    return write_carve(tmp_path_factory.mktemp("carve"), *request.param)


def test_bytes_are_those_of_the_targets_tensors(carve):
    target = target_of(read_config(carve))[0]
    routed, others, whole, dtype = ffn_bytes(carve, carve.parent / "dense")
    size = {"F32": 4, "BF16": 2}[dtype]
    assert routed == LAYERS * EXPERTS * 3 * N * D * size
    always_on = next(always_on for name, _, always_on in TARGETS if MOE_TARGETS[name] is target)
    assert others == LAYERS * 3 * always_on * D * size
    assert whole == routed + others
    assert ffn_bytes(carve, None)[2] == 0


def test_a_dense_ffn_without_a_gate_has_two_matrices(tmp_path):
    routed, others, whole, _ = ffn_bytes(write_carve(tmp_path, "tiny_onn", "arcee", 64), tmp_path / "dense")
    assert 3 * whole == 2 * (routed + others)


def run(capsys, *words):
    code = cache_check.main([str(word) for word in (*words, "--device", "cpu")])
    return code, *capsys.readouterr()


def test_a_carve_has_a_row_for_every_size(carve, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("A cache holds what was used last.\n" * 40)
    words = ["--text", tmp_path / "text.txt", "--tokens", 100, "--cached", "5,2,0", "--dense", carve.parent / "dense"]
    code, out, _ = run(capsys, carve, *words)
    assert code == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"][2:]
    assert [row[0] for row in rows] == ["0", "2", "5"]
    assert [rows[0][2], rows[2][2], rows[2][5]] == ["0.0%", "100.0%", "–"]
    assert float(rows[0][5]) == pytest.approx(EXPERTS / K, abs=0.01)


@pytest.mark.parametrize("carve", TARGETS[:1], indirect=True, ids=["qwen2_moe"])
@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"--cached": "2,6"}, 2, "--cached"),
        ({"--cached": "1"}, 2, "--cached"),
        ({"--cached": "half"}, 2, "--cached"),
        ({"--text": "none.txt"}, 1, "--text"),
        ({"--text": "empty.txt"}, 1, "--text"),
        ({"CHECKPOINT": EMBEDDED}, 1, str(EMBEDDED)),
        ({"--dense": "none"}, 1, "none"),
        ({"--dense": EMBEDDED}, 2, f"--dense {EMBEDDED}"),
    ],
)
def test_wrong_inputs(carve, changes, code, where, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A cache.\n" * 40)
    (tmp_path / "empty.txt").touch()
    words = {"CHECKPOINT": carve, "--text": "text.txt", **changes}
    checkpoint = words.pop("CHECKPOINT")
    found, _, said = run(capsys, checkpoint, *(word for pair in words.items() for word in pair))
    assert found == code
    assert f"  where: {where}" in said
