"""The monitor on parameters that are sharded over processes."""

from integration.forked import free_port, run_ranks


def test_shards_are_added_up():
    from numerics.sharded_watch import main

    port = free_port()
    run_ranks(2, lambda rank: main(rank, port))
