import json

from serve_app.api.errors import RequestError
from serve_app.relay.events import error_event


def test_an_error_is_one_event_in_the_shape_of_openai() -> None:
    error = RequestError(503, "service_unavailable", "gone\nfor now")
    event = error_event(error)
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: ")) == error.body()
