from benchmarks import bench_redis
from benchmarks.redis_rows import measure_redis
from benchmarks.rows import Row


def test_figures_are_read_from_the_text(monkeypatch):
    found = [["flush ÷ benchmark", "0.83 (25 k/s against 30 k/s)", "≥ 0.5"], ["longest script", "41 ms", "≤ 200 ms"]]
    monkeypatch.setattr(bench_redis, "measure", lambda rounds: found[:rounds])
    assert measure_redis(2) == [
        Row("flush ÷ benchmark", [0.83], at_least=0.5, note="(25 k/s against 30 k/s)"),
        Row("longest script", [41.0], at_most=200.0, unit="ms"),
    ]
