import pytest
from hypothesis import settings

# How long an example takes says something of the machine only.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what stops the service after all that uses it."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
