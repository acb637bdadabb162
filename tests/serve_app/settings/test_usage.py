import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import parse
from tests.serve_app.settings.helpers import mistakes, one


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ({"ledger": {"folder": "usage"}}, "args.usage.ledger.folder: must be an absolute path"),
        ({"ledger": {"folder": "/usage", "format": "csv"}}, "args.usage.ledger.format: "),
        ({"ledger": {"folder": "s3://b/x", "spool": "x"}}, "args.usage.ledger.spool: must be an absolute"),
        ({"prices": {"demo": {"input": -1.0}}}, "args.usage.prices.demo.input: "),
        ({"prices": {"demo": {}}}, "args.usage.prices.demo.input: required"),
        ({"prices": {"demo": {"input": 1.0, "batch_discount": 50.0}}}, "args.usage.prices.demo.batch_"),
    ],
)
def test_a_mistake_in_usage_is_named(usage: JSON, words: str) -> None:
    (line,) = mistakes(one() | {"usage": usage})
    assert line.startswith(words)


def test_a_service_keeps_no_ledger_unless_told() -> None:
    assert parse(one()).usage.ledger is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"tenants": {"a": {"tokens": 5}}},
            "args.usage.quotas.tenants.a.tokens: unknown key; allowed here: tokens_per_minute",
        ),
        (
            {"tenants": {"a": {"tokens_per_day": -5}}},
            "args.usage.quotas.tenants.a.tokens_per_day: Input should be greater than or equal to 1, not -5",
        ),
        ({"file": "quotas.yaml"}, "args.usage.quotas.file: must be an absolute path"),
        ({"database": "mysql://x"}, "args.usage.quotas.database: must be a URL such as postgresql://"),
        (
            {"database": "redis://x", "database_env": "X"},
            "args.usage.quotas: give one of folder, database and database_env",
        ),
        ({"away_s": 0}, "args.usage.quotas.away_s: "),
        ({"when_away": "wait"}, "args.usage.quotas.when_away: "),
        ({"limits": {}}, "args.usage.quotas.limits: unknown key; allowed here: tenants, file, folder"),
        ({}, "args: usage.quotas: give folder, database or database_env for their state"),
    ],
)
def test_wrong_quotas_are_told_with_the_fix(fields: JSON, line: str) -> None:
    (found,) = mistakes(one() | {"usage": {"quotas": fields}})
    assert found.startswith(line)


def test_quotas_are_kept_beside_the_batches_or_in_a_place_of_their_own() -> None:
    quotas = {"tenants": {"a": {"tokens_per_minute": 5}}}
    assert parse(one() | {"usage": {"quotas": quotas}, "batches": {"folder": "/x"}}).usage.quotas
    assert parse(one() | {"usage": {"quotas": quotas | {"database": "redis://x:1/0"}}}).usage.quotas
