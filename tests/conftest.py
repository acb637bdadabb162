import pytest
from hypothesis import settings

# How long an example takes says something of the machine only.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what stops the service after all that uses it, and then what needs the machine for itself."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    last = item.get_closest_marker("last")
    return 0 if last is None else last.args[0]
