"""Bytes of tensors that are alive at a time, counted by torch's allocator on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of_tensors(work: Callable[[], object]) -> int:
    """The most bytes of tensors alive during `work`, above those alive before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
