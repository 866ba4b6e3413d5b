"""The monitor on parameters that are sharded over processes, and its logs."""

from integration.forked import free_port, run_ranks

from instruments.training_watch.step_log import read_step_log


def test_shards_are_added_up_and_each_process_has_its_own_log(tmp_path):
    from numerics.sharded_watch import main

    port = free_port()
    run_ranks(2, lambda rank: main(rank, port, tmp_path / "watch.jsonl"))
    logs = {path.name: [line["step"] for line in read_step_log(path)] for path in tmp_path.iterdir()}
    assert logs == {"watch.jsonl": [0, 1], "watch-1.jsonl": [0, 1]}
