"""Errors for models that can't be served, and for wrong options."""


class ModelError(Exception):
    """The model can't be served here; the message has the reason and a remedy."""


class OptionError(Exception):
    """An option or its value doesn't exist; the message names close matches."""
