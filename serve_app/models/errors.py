"""Errors of a model that can't be served, and of options that are wrong."""


class ModelError(Exception):
    """The model can't be served here; the message tells the reason and what would help."""


class OptionError(Exception):
    """An option names a path or has a value that doesn't exist; the message names close matches."""
