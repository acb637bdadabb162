"""How errors name an extra of this package that is missing."""


def extra(name: str) -> str:
    """Return how to install an extra of this package, for error messages.

    Args:
        name: Name of the extra in pyproject.toml.
    """
    return f"saturate[{name}]; in a checkout: pip install -e '.[{name}]'; the images have it"
