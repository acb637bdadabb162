from typing import Any

import pytest
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject

from serve_app.jobs.models import ENDED, STATES, Batch, Page, State, batch_object, file_object, list_object
from tests.serve_app.jobs.helpers import NOW, batch_of, file_of


def with_results(state: State, **fields: Any) -> Batch:
    values = {"total": 3, "completed": 2, "failed": 1, "output_bytes": 20, "error_bytes": 10}
    return batch_of("b", "in", state=state, **(values | fields))


def test_a_file_is_what_the_client_expects() -> None:
    found = FileObject.model_validate(file_object(file_of("a", size=7, expires_at=NOW + 1)), strict=True)
    assert (found.id, found.bytes, found.filename, found.purpose) == ("a", 7, "a.jsonl", "batch")
    assert (found.created_at, found.expires_at, found.status) == (NOW, NOW + 1, "processed")


@pytest.mark.parametrize("state", STATES)
def test_a_batch_is_what_the_client_expects_in_each_state(state: State) -> None:
    found = OpenAIBatch.model_validate(batch_object(with_results(state)), strict=True)
    assert (found.id, found.status, found.input_file_id) == ("b", state, "in")
    assert found.request_counts is not None
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (
        3,
        2,
        1,
    )


@pytest.mark.parametrize("state", STATES)
def test_the_result_files_are_named_once_the_batch_has_ended(state: State) -> None:
    found = batch_object(with_results(state))
    ended = state in ENDED
    assert found["output_file_id"] == ("file-b-out" if ended else None)
    assert found["error_file_id"] == ("file-b-err" if ended else None)


def test_a_result_file_without_rows_is_not_named() -> None:
    found = batch_object(with_results("completed", error_bytes=0))
    assert (found["output_file_id"], found["error_file_id"]) == ("file-b-out", None)
    found = batch_object(with_results("expired", output_bytes=0))
    assert (found["output_file_id"], found["error_file_id"]) == (None, "file-b-err")


def test_errors_and_metadata_are_null_where_there_are_none() -> None:
    found = batch_object(batch_of("b", "in"))
    assert (found["errors"], found["metadata"]) == (None, None)
    error = {"code": "invalid_json", "line": 2, "message": "not JSON", "param": None}
    found = batch_object(batch_of("b", "in", metadata={"a": "1"}, errors=(error,)))
    assert found["errors"] == {"object": "list", "data": [error]}
    assert found["metadata"] == {"a": "1"}


def test_a_warning_is_shown_while_the_batch_is_open() -> None:
    assert batch_object(with_results("in_progress"), "late")["warnings"] == ["late"]
    assert "warnings" not in batch_object(with_results("in_progress"))
    assert "warnings" not in batch_object(with_results("completed"), "late")


def test_tokens_are_added_up() -> None:
    batch = with_results("completed", input_tokens=10, cached_tokens=4, output_tokens=7, reasoning_tokens=2)
    assert batch_object(batch)["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_a_page_names_its_ends() -> None:
    found = list_object(Page([file_of("a"), file_of("b")], True), file_object)
    assert [item["id"] for item in found["data"]] == ["a", "b"]
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("a", "b", True)
    empty = list_object(Page([], False), file_object)
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)
