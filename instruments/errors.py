"""Errors for the person at the keyboard: what happened, where, what to do."""


class UserError(Exception):
    """Something the user can repair. Printed without a traceback.

    Args:
        what: what happened, with the value and the bound.
        where: stage, file, layer or option; every offender.
        do: a remedy that can be pasted.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        """Keep the three parts apart, so that reports can lay them out."""
        self.what, self.where, self.do = what, where, do
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if do:
            lines.append(f"  do:    {do}")
        super().__init__("\n".join(lines))


class ConfigError(UserError):
    """A setting is wrong; found before any weights are loaded."""


class CheckpointError(UserError):
    """A checkpoint cannot be read or written."""


class DataError(UserError):
    """The text cannot be read or holds nothing to learn from."""


class ContractError(UserError):
    """What passes between stages is missing, damaged or of another version."""


class NumericsError(UserError):
    """A computation gave no usable number."""
