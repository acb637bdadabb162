"""Quotas of tenants from a file: a wrong one is refused with its path, and what held stays."""

import logging
from pathlib import Path

import pytest

from serve_app.quotas.tenants import TenantQuotas
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import Quota, QuotasSettings


def quotas_of(file: Path, held: str | None = None) -> TenantQuotas:
    return TenantQuotas(
        QuotasSettings(
            tenants={"a": Quota(tokens_per_day=1), "b": Quota(tokens_per_day=2)}, file=str(file), folder="/x"
        ),
        held,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {tokens: 5}", "a.tokens: unknown key; allowed here: tokens_per_minute, tokens_per_day"),
        ("a: {tokens_per_day: -5}", "a.tokens_per_day: Input should be greater than or equal to 1, not -5"),
        ("a: {tokens_per_day: '5'}", "a.tokens_per_day: "),
        ("a: 5", "a: "),
        ("[]", "must be an object with a quota for each tenant"),
        ("a: {}\na: {}", "the field 'a' in line 2 is in line 1 too"),
        ("a: {", "this is not YAML: "),
        ("a: !!bool maybe", "this is not YAML"),
        ("[" * 2_000, "this is not YAML"),
        ("'': {}", "must be 1 to 128 printable characters"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        quotas_of(file)
    assert str(caught.value).startswith(f"usage.quotas.file ({file}): ")
    assert words in str(caught.value)


def test_a_tenant_may_look_like_a_date(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("1234-56-78: {tokens_per_day: 5}")
    assert quotas_of(file).quotas.keys() == {"a", "b", "1234-56-78"}


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("b: {tokens_per_day: 20}\nc: {requests_per_minute: 3}")
    quotas = quotas_of(file)
    assert quotas.quotas == {
        "a": Quota(tokens_per_day=1),
        "b": Quota(tokens_per_day=20),
        "c": Quota(requests_per_minute=3),
    }


def test_a_change_is_taken_over_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("b: {tokens_per_day: 20}")
    quotas = quotas_of(file)
    version = quotas.version
    assert not quotas.refresh()
    file.write_text("b: {tokens_per_day: 300}")
    assert quotas.refresh()
    assert quotas.quotas["b"].tokens_per_day == 300
    assert quotas.version != version
    for wrong in ("b: {tokens_per_day: -1}", None):
        if wrong is None:
            file.unlink()
        else:
            file.write_text(wrong)
        with caplog.at_level(logging.WARNING, "ray.serve"):
            assert not quotas.refresh()
        assert str(file) in caplog.text
        assert quotas.quotas["b"].tokens_per_day == 300


def test_a_process_that_starts_with_a_wrong_file_keeps_the_last_quotas(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("b: {tokens_per_day: -1}")
    with pytest.raises(SettingsError, match=r"b\.tokens_per_day"):
        quotas_of(file)
    quotas = quotas_of(file, held="b: {tokens_per_day: 20}")
    assert quotas.quotas["b"].tokens_per_day == 20


def test_equal_quotas_have_the_same_version_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("b: {tokens_per_day: 20}")
    assert quotas_of(file).version == quotas_of(file).version


def test_a_file_that_could_not_be_read_is_read_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("b: {tokens_per_day: 20}")
    quotas = quotas_of(file)
    file.write_text("b: {tokens_per_day: 300}")

    def fail(*_: object, **__: object) -> str:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        assert not quotas.refresh()
    assert quotas.refresh()
    assert quotas.quotas["b"].tokens_per_day == 300
