"""The layout of every error message."""


def message(what, where, do):
    """What happened, where, what to do."""
    return f"{what}\n  where: {where}\n  do:    {do}\n"
