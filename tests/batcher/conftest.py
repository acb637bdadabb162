import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def little_garbage() -> Iterator[None]:
    """Keep the collector to what the test makes: with all else a collection takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def unraisable(little_garbage: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of what goes wrong while garbage is collected."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found
