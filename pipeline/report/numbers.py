"""Numbers as a reader wants them."""


def nats(value: float) -> str:
    """A difference of losses: four decimals, always signed."""
    return f"{value:+.4f}".replace("-", "−")


def percent(share: float) -> str:
    """Whole percents, one decimal below ten; the space does not break."""
    value = 100 * share
    return f"{value:.{0 if abs(value) >= 9.95 or not value else 1}f}\N{NO-BREAK SPACE}%".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    match seconds:
        case None:
            return "–"
        case _ if seconds < 99.95:
            return f"{seconds:.1f} s"
        case _ if seconds < 5970:
            return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: int | None) -> str:
    """Bytes in MiB or GiB."""
    if count is None:
        return "–"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def plain(value: object) -> str:
    """A cell of a table: whole numbers with separators, others with four digits."""
    match value:
        case None:
            return "–"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}".replace("-", "−")
        case float():
            return f"{value:.4g}".replace("-", "−")
    return str(value)
