"""The one exception that the command line shows as one line, with its own exit code."""


class UserError(ValueError):
    """A mistake in the options, the data or the run folder; the message says what was expected, found, and the fix."""

    exit_code = 2
