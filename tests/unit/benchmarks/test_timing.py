import torch
from benchmarks.timing import Task, take_turns


def test_tasks_take_turns_and_the_first_round_does_not_count():
    log = []
    tasks = {
        "a": Task(lambda: log.append("a")),
        "b": Task(lambda: log.append("b"), lambda: log.append("before"), lambda: log.append("after")),
    }
    seconds = take_turns(tasks, 2, torch.device("cpu"))
    assert log == ["a", "before", "b", "after"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    assert all(value >= 0 for values in seconds.values() for value in values)
