"""Lists of routes in messages."""

from serve_app.api.routes import MOVED, OPENAI, SAME, TOKENIZING, listed, unserved


def test_routes_are_listed_once_in_the_order_of_their_frequency() -> None:
    assert listed({"/v1/score", "/score", "/v1/embeddings", "/generate"}) == (
        "/generate, /v1/embeddings and /v1/score"
    )
    assert listed({"/classify", "/docs", "/v1/models"}) == "/v1/classify"
    assert listed({"/docs"}) == "/tokenize"


def test_each_other_name_has_one_that_is_listed() -> None:
    assert set(OPENAI) >= SAME
    assert set(MOVED) <= {*OPENAI, *TOKENIZING}


def test_a_route_that_is_not_served_is_a_400_with_those_that_are() -> None:
    error = unserved("bge", "/v1/rerank", {"/v1/embeddings"})
    assert (error.status, error.param) == (400, "model")
    assert error.message == "model: 'bge' serves /v1/embeddings, not /v1/rerank"
    assert unserved("bge", "/classify", {"/v1/embeddings"}).message.endswith("not /v1/classify")
