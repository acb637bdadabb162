import pytest

from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.models import STATES, State
from serve_app.jobs.rows import Row
from tests.serve_app.jobs.helpers import batch_of


@pytest.mark.parametrize("state", STATES)
def test_rows_are_sent_in_progress_only(state: State) -> None:
    batch = OpenBatch(batch_of("b", "in", state=state))
    assert batch.takes_rows == (state == "in_progress")


async def test_no_row_is_sent_once_it_stops() -> None:
    batch = OpenBatch(batch_of("b", "in", state="in_progress"))
    batch.stopping.set()
    assert not batch.takes_rows


def test_it_is_exhausted_once_the_input_was_read_and_its_rows_were_taken() -> None:
    batch = OpenBatch(batch_of("b", "in"))
    assert not batch.exhausted
    batch.rows.append(Row(1, b"{}"))
    batch.read = True
    assert not batch.exhausted
    batch.rows.popleft()
    assert batch.exhausted
