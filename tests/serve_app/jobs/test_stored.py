import dataclasses

from serve_app.jobs.models import STATES, Batch, Counts
from tests.serve_app.jobs.helpers import batch_of


def test_all_that_is_added_for_a_group_of_rows_is_a_field_of_the_batch() -> None:
    batch = batch_of("b", "in")
    assert {name: getattr(batch, name) for name in Counts._fields} == dict.fromkeys(Counts._fields, 0)


def test_each_state_but_the_first_has_its_time() -> None:
    times = {field.name for field in dataclasses.fields(Batch) if field.name.endswith("_at")}
    assert times - {"created_at", "expires_at"} == {
        f"{state}_at" for state in STATES if state != "validating"
    }
