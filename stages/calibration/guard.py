"""Which calibration batches are held out to judge by."""


def split_guard(batches: int, share: float) -> tuple[list[int], list[int]]:
    """Batches to fit on and batches to judge by, the latter spread evenly; at least one of each where there are two."""
    guards = min(max(1, round(share * batches)), max(0, batches - 1))
    held = {round((index + 0.5) * batches / guards - 0.5) for index in range(guards)} if guards else set()
    fitted = [index for index in range(batches) if index not in held]
    return fitted, sorted(held) or fitted
