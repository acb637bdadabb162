import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what stops the service after all that uses it."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
