"""The one exception a user is meant to read."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that names the value, the rule it broke and the likely fix; the command line prints
    it as it is and exits with status 2.
    """
