import pytest

from tests.serve_app.telemetry.front import Front


@pytest.fixture
def front() -> Front:
    return Front()
