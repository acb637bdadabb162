from types import SimpleNamespace

import pytest
import ray
from ray import serve

from tests.serve_app.jobs.generate_handle import Handle


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The handle of the Engine `demo` in the application `llm`, without a cluster."""
    handle = Handle()
    app = SimpleNamespace(deployments={"Engine:demo": None})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"llm": app}))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_, **__: handle)
    return handle
