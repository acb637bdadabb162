"""States, and what is stored of files and batches."""

import dataclasses

from serve_app.jobs.models import ENDED, STATES, TRANSITIONS, Batch, Counts, State
from tests.serve_app.jobs.helpers import batch_of


def test_every_state_has_its_ways() -> None:
    assert set(TRANSITIONS) == set(STATES)
    assert {"completed", "failed", "expired", "cancelled"} == ENDED


def test_every_open_state_leads_to_an_end() -> None:
    for state in set(STATES) - ENDED:
        reached: set[State] = set()
        todo = [state]
        while todo:
            for after in TRANSITIONS[todo.pop()] - reached:
                reached.add(after)
                todo.append(after)
        assert reached & ENDED, state
        assert state not in reached, f"{state} is reached again"


def test_each_sum_over_rows_is_a_field_of_the_batch() -> None:
    batch = batch_of("b", "in")
    assert {name: getattr(batch, name) for name in Counts._fields} == dict.fromkeys(Counts._fields, 0)


def test_each_state_but_the_first_has_its_time() -> None:
    times = {field.name for field in dataclasses.fields(Batch) if field.name.endswith("_at")}
    assert times - {"created_at", "expires_at"} == {
        f"{state}_at" for state in STATES if state != "validating"
    }
