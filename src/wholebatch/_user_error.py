"""Mistakes of the user that the command line shows as one line, and the spelling of options in them."""


class UserError(ValueError):
    """A mistake in the options, the data or the run folder; the message says what was expected, found, and the fix."""

    exit_code = 2


def option(name: str) -> str:
    """Return the command-line option of a field.

    >>> option("model.text_width")
    '--model.text-width'
    """
    return f"--{name.replace('_', '-')}"


def require(condition: object, name: str, expected: str, got: object) -> None:
    """Raise UserError unless the condition holds, about the option of a field and its accepted values.

    >>> require(3 >= 1, "steps", "at least 1", 3)
    >>> require(0 >= 1, "steps", "at least 1", 0)
    Traceback (most recent call last):
        ...
    wholebatch._user_error.UserError: --steps must be at least 1, got 0
    """
    if not condition:
        raise UserError(f"{option(name)} must be {expected}, got {got}")
