"""Used shares of limits as metrics, with a bounded number of series."""

from serve_app.quotas.metrics import QuotaMetrics
from serve_app.quotas.service import QuotaService
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from tests.serve_app.quotas.fleet import START, Engine, MemoryState, inline

NAME = "saturate_quota_used_ratio"


def meters(values: dict[tuple[str, ...], float]) -> Meters:
    """Return meters that put the last value of each series into `values`."""

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            values[metric.name, *labels.values()] = value

        return record

    return Meters(catalogue.QUOTAS, make)


async def using(**used: int) -> QuotaService:
    """Return a service whose tenants have used some of their 100 tokens."""
    quota = Quota(tokens_per_day=100)
    settings = QuotasSettings(tenants=dict.fromkeys(used, quota), folder="/nowhere")
    service = QuotaService(settings, MemoryState(), wall=lambda: START, monotonic=lambda: 0.0, beside=inline)
    service.start()
    for tenant, tokens in used.items():
        engine = Engine(f"of {tenant}", tenant, quota)
        await service.take(engine.hold(await service.take(engine.ask(tokens))))
    return service


async def test_the_fullest_have_series_of_their_own_and_the_others_share_one() -> None:
    values: dict[tuple[str, ...], float] = {}
    service = await using(a=90, b=40, c=30)
    metrics = QuotaMetrics(service.states, 1, meters(values))
    await metrics.report()
    assert values == {
        (NAME, "tenant a", "tokens_per_day"): 0.9,
        (NAME, "other", "tokens_per_day"): 0.4,
    }
    await service.close()


async def test_nothing_is_used_of_a_limit_that_is_gone() -> None:
    values: dict[tuple[str, ...], float] = {}
    service, later = await using(a=95, b=90), await using()
    metrics = QuotaMetrics(lambda: service.states(), 1, meters(values))
    await metrics.report()
    await service.close()
    service = later
    await metrics.report()
    assert values == {
        (NAME, "tenant a", "tokens_per_day"): 0.0,
        (NAME, "other", "tokens_per_day"): 0.0,
    }
    await service.close()
