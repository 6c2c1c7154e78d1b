"""Mistakes of the user that the command line shows as one line, and the spelling of options in them."""

import sys
import unicodedata

_JOINERS = "\u200c\u200d"  # of letters and of emoji, which change no other text
_COMMANDS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode that a terminal may obey instead of showing


class UserError(ValueError):
    """A mistake in the options, the data or the run folder; the message says what was expected, found, and the fix."""

    exit_code = 2


def needs(user: str, *modules: str) -> str:
    """Return a message about modules that are not installed; this package with its extras is on no index."""
    return f"{user} needs {', '.join(modules)}: pip install {' '.join(modules).replace('PIL', 'pillow')}"


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
    wholebatch._base.user_error.UserError: --steps must be at least 1, got 0
    """
    if not condition:
        raise UserError(f"{option(name)} must be {expected}, got {got}")


def printable(text: str) -> str:
    r"""Return a text of the data, with escapes for what a terminal would obey, or its encoding does not have.

    >>> printable("a \x1b[2J\u202e"), printable("a\nb")
    ('a \\x1b[2J\\u202e', 'a\\nb')
    """
    shown = "".join(
        repr(letter)[1:-1] if unicodedata.category(letter) in _COMMANDS and letter not in _JOINERS else letter
        for letter in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)
