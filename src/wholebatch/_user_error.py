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
