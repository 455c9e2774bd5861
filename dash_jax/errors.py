"""What ends a run: each in one line, for the person who started it."""


class UserError(Exception):
    """Bad configuration or input: one line with the field or file, the value and the mend. Exit code 2."""


class RunError(Exception):
    """A run that cannot go on, in one line. Exit code 1."""
