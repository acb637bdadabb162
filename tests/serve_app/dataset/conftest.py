import pytest

from tests.serve_app.jobs.generate_handle import Handle, put_in_place


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The handle of the Engine `demo` in the application `llm`, without a cluster."""
    return put_in_place(monkeypatch)
