"""Adapters in a config's `args`."""

from typing import Any

import pytest

from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError, parse


def model(*adapters: Any, **more: Any) -> LLMSettings:
    settings = parse({"models": [{"id": "demo", "source": "x", "adapters": list(adapters)} | more]})
    found = settings.models[0]
    assert isinstance(found, LLMSettings)
    return found


def test_an_adapter_is_named_after_its_model_and_source_unless_it_has_an_id() -> None:
    adapters = model({"source": "s3://bucket/a/words/"}, {"source": "org/x", "id": "y"}, {"source": "/z/w"})
    assert list(adapters_by_id("demo", adapters.adapters)) == ["demo:words", "y", "demo:w"]
    assert [adapter.root for adapter in adapters.adapters] == ["words", "org/x", "w"]


def test_the_demo_adapters_are_in_the_package() -> None:
    (adapter,) = model({"source": "saturate://demo/letters"}).adapters
    assert adapter.location.endswith("/serve_app/demo/adapters/letters")


@pytest.mark.parametrize(
    "source",
    [
        "http://169.254.169.254/latest",
        "file:///etc",
        "ftp://host/words",
        "zip://words.zip",
        "reference://words",
        "memory://words",
        "s3",
        "S3://bucket/words",
        "zip::s3://bucket/words.zip",
        "s3::http://host/words",
        "https://host/words::s3://bucket/x",
        "://words",
        "saturate://demo/../x",
        "saturate://other/letters",
    ],
)
def test_other_schemes_are_refused_with_those_that_are_allowed(source: str) -> None:
    with pytest.raises(SettingsError, match="s3://, s3a://, gs://, gcs://, az://, abfs://, abfss://, hf://"):
        model({"source": source, "id": "x"})


@pytest.mark.parametrize(
    "source", ["gs://b/x", "az://c/x", "abfs://c@a/x", "hf://org/x", "https://h/x", "~/x"]
)
def test_folders_and_object_storage_are_allowed(source: str) -> None:
    assert model({"source": source}).adapters[0].name == "x"


@pytest.mark.parametrize(
    ("adapters", "more", "message"),
    [
        ([{"source": "words"}], {}, r"models\[0\]\.adapters\[0\]\.source: must be an absolute path"),
        ([{"source": "/a/x"}, {"source": "/b/x"}], {}, "'demo:x' is used twice"),
        ([{"source": "/a/x", "id": "demo"}], {}, "'demo' is used twice"),
        ([{"source": "/x", "id": "a b"}], {}, r"adapters\[0\]\.id"),
        ([{"source": "/x", "rank": 1}], {}, "unknown key; allowed here: source, id, pinned"),
        ([{"source": "/x", "pinned": True}], {"engine": {"max_loras": 1}}, "one slot must stay free"),
        ([{"source": "/x"}], {"engine": {"enable_lora": False}}, "enable_lora: must be true"),
        ([{"source": "/x"}], {"engine": {"max_lora_rank": 9}}, "max_lora_rank"),
        ([], {"adapters_folder": "kept"}, "must be an absolute path"),
        ([{"source": "/x"}], {"engine": {"extra": {"worker_extension_cls": "a.B"}}}, "_cls: an engine with"),
    ],
)
def test_a_mistake_is_named(adapters: Any, more: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        model(*adapters, **more)


def test_there_are_as_many_slots_as_adapters_within_bounds() -> None:
    def slots(count: int, **more: Any) -> tuple[int, int]:
        found = model(*({"source": f"/a/{number}"} for number in range(count)), **more)
        return found.slots, found.cpu_slots

    assert slots(2) == (2, 8)
    assert slots(20) == (8, 32)
    assert slots(100) == (8, 64)
    assert slots(0, adapters_folder="/kept") == (4, 16)
    assert slots(0, engine={"enable_lora": True}) == (4, 16)
    assert slots(2, engine={"max_loras": 3, "max_cpu_loras": 5}) == (3, 5)
    pinned = [{"source": f"/a/{number}", "pinned": True} for number in range(9)]
    assert model(*pinned).slots == 10


def test_adapters_are_off_unless_there_are_some_or_may_be() -> None:
    assert not model().has_adapters
    assert model(engine={"enable_lora": True}).has_adapters
    assert model({"source": "/x"}).has_adapters
    assert model(adapters_folder="s3://bucket/kept").has_adapters
