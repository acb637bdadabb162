"""Health of the models, judged by the report of Ray Serve's controller."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeStatus,
)

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import (
    Health,
    HealthReport,
    ModelState,
    engine_name,
)
from serve_app.settings.schema import parse
from tests.progress import STILL_S
from tests.serve_app.ingress.engine_doubles import Engine, echo


def deployment(
    status: DeploymentStatus = DeploymentStatus.HEALTHY,
    replicas: dict[ReplicaState, int] | None = None,
    message: str = "",
) -> DeploymentStatusOverview:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    return DeploymentStatusOverview(status, trigger, replicas or {}, message)


class Controller:
    """Stands for Serve's controller.

    Attributes:
        deployments: What it knows, by deployment.
        calls: How often it was asked.
        asked: Set once it was asked.
        now: The time, in seconds.
    """

    def __init__(self) -> None:
        self.deployments: dict[str, DeploymentStatusOverview] = {}
        self.app = "llm"
        self.calls = 0
        self.now = 100.0
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def status(self) -> ServeStatus:
        self.calls += 1
        self.asked.set()
        assert self.may_answer.wait(STILL_S)
        if self.error:
            raise self.error
        app = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, self.deployments)
        return ServeStatus(applications={self.app: app})


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    controller = Controller()
    monkeypatch.setattr(serve, "status", controller.status)
    # Not `time.monotonic` itself: the event loop has to keep its clock.
    monkeypatch.setattr("serve_app.ingress.status.time", SimpleNamespace(monotonic=lambda: controller.now))
    return controller


async def test_an_ingress_may_stand_in_front_of_another_application_s_engines(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(app_name="other", replica_tag="r")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    controller.deployments["Engine:a"] = deployment(replicas={ReplicaState.RUNNING: 1})
    # This process has tests to run yet.
    monkeypatch.setattr("serve_app.ingress.deployment.use_batch_scheduling", lambda nice: None)
    monkeypatch.setattr("serve_app.auth.bind_check.serve_host", lambda: "127.0.0.1")
    settings = parse({"models": [{"id": "a", "source": "x"}]})
    engines: Any = {"a": Engine(echo)}
    for app, status in (("llm", 200), (None, 503)):
        transport = httpx.ASGITransport(
            Ingress(settings, engines, engines_app=app).__serve_build_asgi_app__()
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
            assert (await client.get("/health")).status_code == status


async def test_a_simulated_model_is_named_as_one(controller: Controller) -> None:
    controller.deployments["Engine:a"] = deployment(replicas={ReplicaState.RUNNING: 1})
    body = (await Health("llm", ["a", "b"], {"a": "h100-8b"}).read()).body()
    assert body["models"]["a"] == {"state": "ready", "replicas": 1, "simulated": "h100-8b"}
    assert "simulated" not in body["models"]["b"]


async def read(*models: str) -> HealthReport:
    return await Health("llm", list(models or ["demo"])).read()


def test_a_model_s_deployment_carries_its_name() -> None:
    assert engine_name("demo") == "Engine:demo"


async def test_a_running_replica_makes_a_model_ready(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment(replicas={ReplicaState.RUNNING: 2})
    report = await read()
    assert report.ready
    assert report.replicas("demo") == 2
    assert report.body() == {"status": "ok", "models": {"demo": {"state": "ready", "replicas": 2}}}


async def test_replicas_of_the_batches_are_counted_beside_the_models(controller: Controller) -> None:
    assert (await read()).others == {}
    controller.deployments["Batches"] = deployment(
        replicas={ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1}
    )
    report = await read()
    assert report.others == {"Batches": 1}
    assert list(report.models) == ["demo"]


async def test_a_replica_that_starts_is_awaited(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment(
        DeploymentStatus.UPDATING, {ReplicaState.STARTING: 1}, "waiting for 1 GPU"
    )
    report = await read()
    assert not report.ready
    assert report.replicas("demo") == 0
    assert report.body() == {
        "status": "starting",
        "models": {"demo": {"state": "starting", "replicas": 0, "awaits": "waiting for 1 GPU"}},
    }


async def test_the_missing_part_is_named_even_without_a_message_of_serve(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment(DeploymentStatus.UPDATING)
    body = (await read()).body()
    assert body["models"]["demo"]["awaits"] == "an Engine replica (deployment updating)"


async def test_only_running_replicas_count(controller: Controller) -> None:
    states = dict.fromkeys(ReplicaState, 1)
    controller.deployments["Engine:demo"] = deployment(DeploymentStatus.UPDATING, states)
    assert (await read()).replicas("demo") == 1


async def test_a_model_scaled_to_zero_is_asleep_and_ready(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment()
    report = await read()
    assert report.ready
    assert report.replicas("demo") == 0
    assert report.body()["models"]["demo"] == {"state": "asleep", "replicas": 0}


async def test_a_model_that_keeps_a_replica_through_an_update_stays_ready(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment(
        DeploymentStatus.UPDATING, {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1}
    )
    assert (await read()).ready


async def test_an_unhealthy_model_without_replicas_is_not_asleep(controller: Controller) -> None:
    controller.deployments["Engine:demo"] = deployment(DeploymentStatus.UNHEALTHY, {}, "engine died")
    report = await read()
    assert not report.ready
    assert report.body()["models"]["demo"]["awaits"] == "engine died"


async def test_one_model_that_is_ready_is_enough(controller: Controller) -> None:
    controller.deployments["Engine:a"] = deployment(DeploymentStatus.UPDATING)
    controller.deployments["Engine:b"] = deployment(replicas={ReplicaState.RUNNING: 1})
    report = await read("a", "b")
    assert report.ready
    assert report.body()["status"] == "partial"
    assert [model["state"] for model in report.body()["models"].values()] == ["starting", "ready"]


async def test_a_deployment_that_is_not_there_yet(controller: Controller) -> None:
    assert (await read()).models == {"demo": ModelState(0, asleep=False, awaits="the deployment")}


async def test_another_application_s_model_is_not_ours(controller: Controller) -> None:
    controller.app = "other"
    controller.deployments["Engine:demo"] = deployment(replicas={ReplicaState.RUNNING: 1})
    assert not (await read()).ready


async def test_the_controller_is_asked_now_and_then_and_more_often_while_a_model_is_awaited(
    controller: Controller,
) -> None:
    health = Health("llm", ["demo"])
    first = await health.read()
    controller.deployments["Engine:demo"] = deployment()
    controller.now += 0.5
    assert await health.read() is first
    controller.now += 0.001
    second = await health.read()
    assert second.ready
    controller.now += 2.0
    assert await health.read() is second
    controller.now += 0.001
    await health.read()
    assert controller.calls == 3


async def test_readers_at_one_time_share_an_answer_and_leave_the_loop_free(controller: Controller) -> None:
    health = Health("llm", ["demo"])
    controller.may_answer.clear()
    readers = [asyncio.ensure_future(health.read()) for _ in range(20)]
    await asyncio.sleep(0)
    assert not any(reader.done() for reader in readers)
    controller.may_answer.set()
    async with asyncio.timeout(STILL_S):
        reports = await asyncio.gather(*readers)
    assert controller.calls == 1
    assert all(report is reports[0] for report in reports)


async def test_after_a_failed_read_the_next_one_asks_again(controller: Controller) -> None:
    health = Health("llm", ["demo"])
    controller.error = RuntimeError("the controller is gone")
    with pytest.raises(RuntimeError, match="is gone"):
        await health.read()
    controller.error = None
    controller.deployments["Engine:demo"] = deployment()
    assert (await health.read()).ready


async def test_readers_that_leave_end_no_reading_and_begin_no_other(controller: Controller) -> None:
    health = Health("llm", ["demo"])
    controller.may_answer.clear()
    for _ in range(3):
        reader = asyncio.ensure_future(health.read())
        assert await asyncio.to_thread(controller.asked.wait, STILL_S)
        reader.cancel()
        await asyncio.wait({reader})
    controller.may_answer.set()
    async with asyncio.timeout(STILL_S):
        await health.read()
    assert controller.calls == 1


async def test_a_controller_that_does_not_answer_is_an_error_and_is_asked_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health("llm", ["demo"])
    controller.may_answer.clear()
    async with asyncio.timeout(STILL_S):
        for _ in range(3):
            monkeypatch.setattr("serve_app.ingress.status.ANSWER_S", 0.01)
            with pytest.raises(TimeoutError):
                await health.read()
        controller.may_answer.set()
        monkeypatch.setattr("serve_app.ingress.status.ANSWER_S", STILL_S)
        await health.read()
    assert controller.calls == 1
