"""Names of leases, and the limits of each kind."""

from serve_app.quotas.messages import LIMITS, key_subject, limits_of, tenant_subject
from serve_app.settings.usage import Quota


def test_every_limit_of_a_quota_belongs_to_one_kind() -> None:
    names = [name for names in LIMITS.values() for name in names]
    assert sorted(names) == sorted(Quota.model_fields)


def test_limits_that_are_left_out_do_not_exist() -> None:
    quota = Quota(tokens_per_day=5, max_concurrency=2)
    assert [limits_of(quota, kind) for kind in LIMITS] == [{"tokens_per_day": 5}, {}, {"max_concurrency": 2}]


def test_a_key_and_a_tenant_of_the_same_name_differ() -> None:
    assert key_subject("a") != tenant_subject("a")
