import pytest

from serve_app.driver.api_progress import Display


def test_the_progress_has_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    display = Display(False, clock=lambda: now)
    counts = {"total": 100, "completed": 0, "failed": 0}
    display.update({"status": "in_progress", "request_counts": counts})
    now = 10.0
    display.update({"status": "in_progress", "request_counts": counts | {"completed": 20, "failed": 5}})
    printed = capsys.readouterr().err
    assert printed == "in_progress, 25/100 rows, 5 failed, 2.5 rows/s, ETA 0:30\n"
