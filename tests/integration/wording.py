"""How every error is laid out."""


def message(what, where, do):
    """What happened, where, what to do."""
    return f"{what}\n  where: {where}\n  do:    {do}\n"
