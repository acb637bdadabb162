"""Admission at the door: every job gets its slot with all that it needs, or a refusal, before it runs."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Aborted, BatcherError, Closed, Expired, Oversize, QueueFull
from serve_app.api.errors import RequestError
from serve_app.engine.door import STARTING, refusal_of
from serve_app.engine.job import Job
from tests.batcher.virtual import VirtualLoop, blocked, now, virtual
from tests.serve_app.engine.engine_doubles import (
    BLOCK,
    CONTEXT,
    PlayedAdapters,
    Site,
    grammar_body,
    new_job,
    opened,
)

WORDS, SUMS = "demo:words", "demo:sums"
NO_MODEL = {"runs": False, "output": 0}


def start(work: Any) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.ensure_future(work)
    # A test looks at the errors that it expects.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def refused(work: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


# Refusals.


def test_a_full_queue_says_when_to_come_back() -> None:
    error = refusal_of(QueueFull("max_queue_size", 5000, 2.34))
    assert (error.status, error.type, error.retry_after_s) == (429, "rate_limit_error", 2.34)
    for seconds, told in ((2.34, "3"), (0.004, "1"), (0.0, "1"), (7.0, "7")):
        error = refusal_of(QueueFull("max_queue_size", 5000, seconds))
        assert (f"again in {told} s" in error.message, error.headers()) == (True, {"retry-after": told})


def test_a_job_whose_deadline_has_passed_is_not_to_be_sent_again() -> None:
    error = refusal_of(Expired())
    assert (error.status, error.type) == (408, "timeout_error")
    # OpenAI's clients would send it again, though its time is over.
    assert error.headers() == {"x-should-retry": "false"}


def test_the_error_of_a_job_that_can_never_run_has_the_limit() -> None:
    error = refusal_of(Oversize(900, 800))
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert "900" in error.message
    assert "800" in error.message
    assert error.headers() == {}
    error = refusal_of(Oversize(128, 64, "places"))
    assert (error.status, error.param) == (400, "n")
    assert "128 answers" in error.message


@pytest.mark.parametrize("reason", [Closed("stopping"), Aborted("x"), BatcherError("y")])
def test_a_batcher_that_is_closed_sends_clients_to_another_replica(reason: BatcherError) -> None:
    error = refusal_of(reason)
    assert (error.status, error.type) == (503, "service_unavailable")
    assert error.headers() == {"retry-after": "1"}


@virtual
async def test_a_full_queue_refuses_at_once_and_a_stream_that_goes_on_waits() -> None:
    async with opened(max_running=1, max_queue_size=1) as site:
        tasks = [start(site.run(new_job())) for _ in range(2)]
        await blocked()
        error = await refused(site.run(new_job()))
        assert (error.status, error.retry_after_s is not None) == (429, True)
        assert now() < 0.1
        tasks.append(start(site.run(new_job(resumes=True))))
        await blocked()
        assert site.batcher.stats.outside == 1
        await asyncio.gather(*tasks)
        site.check_free()


@virtual
async def test_an_engine_that_is_unfit_refuses_jobs_those_that_wait_too() -> None:
    async with opened(max_running=1) as site:
        held, waits = start(site.run(new_job())), start(site.run(new_job()))
        await blocked()
        site.refusal = RequestError(503, "service_unavailable", "asleep")
        assert (await refused(site.run(new_job()))).message == "asleep"
        assert site.batcher.stats.total_submitted == 2
        assert (await refused(waits)).message == "asleep"
        await held
        site.check_free()


@virtual
async def test_more_answers_than_the_engine_runs_at_once_are_refused() -> None:
    async with opened(places=4) as site:
        error = await refused(site.run(new_job(facts={"answers": 5}), n=5))
        assert (error.status, error.param) == (400, "n")
        await site.run(new_job(facts={"answers": 4}), n=4)


@virtual
async def test_a_door_whose_batchers_have_stopped_is_a_503() -> None:
    async with opened() as site:
        await site.batcher.stop()
        await site.texts.stop()
        for facts in ({}, NO_MODEL):
            assert (await refused(site.door.admit(new_job(facts=facts)))).status == 503


# Cost.


@pytest.mark.parametrize(
    ("facts", "cost"),
    [
        # 10 + 4 tokens are one block of 16; 10 + 7 are two.
        ({}, BLOCK),
        ({"output": 7}, 2 * BLOCK),
        ({"output": 7, "answers": 3}, 6 * BLOCK),
        # A prompt may fill the context, and an answer the rest of it; never more.
        ({"output": None}, CONTEXT),
        ({"prompt": None}, CONTEXT),
        ({"prompt": 10_000_000, "output": 7}, CONTEXT),
        # The model makes no tokens.
        ({"output": 0}, BLOCK),
    ],
)
@virtual
async def test_a_job_is_admitted_on_a_bound_and_its_prompt_runs_at_its_exact_cost(
    facts: dict[str, Any], cost: int
) -> None:
    async with opened() as site:
        job = new_job(facts=facts)
        await site.door.admit(job)
        assert site.batcher.stats.running_cost == cost
        async with site.door.place(job, 3, 2, facts.get("answers", 1)):
            assert site.batcher.stats.running_cost == 5
        site.check_free()


@virtual
async def test_a_bound_beyond_the_engine_lets_the_job_run_alone() -> None:
    async with opened(capacity=CONTEXT // 2) as site:
        await site.run(new_job(facts={"prompt": None, "answers": 4}), n=4)
        site.check_free()


@virtual
async def test_what_a_bound_has_held_too_much_is_free_before_the_prompt_runs() -> None:
    async with opened(capacity=CONTEXT) as site:
        job = new_job(facts={"prompt": None})
        await site.door.admit(job)
        other = start(site.run(new_job()))
        await blocked()
        assert site.batcher.stats.queue_depth == 1
        async with site.door.place(job, BLOCK, 0, 1):
            await other
        site.check_free()


@virtual
async def test_answers_are_as_many_records_and_a_better_tier_goes_before_them() -> None:
    """110 `flex` jobs of eight answers: 880 sequences for 256 places."""
    jobs, answers, places = 110, 8, 256
    started: list[str] = []
    async with opened(capacity=1_000_000, max_running=places) as site:

        async def ask(name: str, priority: int, n: int) -> None:
            job = new_job(facts={"answers": n}, priority=priority, tenant=name)
            async with site.placed(job, n=n):
                started.append(name)
                await asyncio.sleep(1.0)

        tasks = [start(ask("flex", 1, answers)) for _ in range(jobs)]
        await blocked()
        stats = site.batcher.stats
        assert (stats.running, len(started)) == (places, places // answers)
        assert stats.queue_depth == jobs * answers - places
        tasks.append(start(ask("live", -1, 1)))
        await asyncio.gather(*tasks)
        assert started[places // answers] == "live"
        assert site.batcher.stats.total_completed == jobs * answers + 1


@pytest.mark.parametrize(("tenant", "turn"), [("default", 2), ("acme", 20)])
@virtual
async def test_a_flood_on_an_adapter_holds_up_another_only_within_a_named_tenant(
    tenant: str, turn: int
) -> None:
    started: list[str] = []
    async with opened(max_running=1) as site:

        async def ask(adapter: str) -> None:
            async with site.placed(new_job(tenant=tenant, adapter=adapter)):
                started.append(adapter)
                await asyncio.sleep(1.0)

        tasks = [start(ask(WORDS)) for _ in range(20)]
        await blocked()
        tasks.append(start(ask(SUMS)))
        await asyncio.gather(*tasks)
    assert started.index(SUMS) == turn


@virtual
async def test_the_weight_of_a_tenant_holds_in_the_queue() -> None:
    started: list[str] = []
    async with opened(max_running=1) as site:

        async def ask(tenant: str, weight: float | None) -> None:
            async with site.placed(new_job(tenant=tenant, weight=weight)):
                started.append(tenant)
                await asyncio.sleep(1.0)

        tasks = [start(ask("small", None)) for _ in range(8)] + [start(ask("large", 3.0)) for _ in range(8)]
        await asyncio.gather(*tasks)
    assert started[1:9].count("large") == 6


# Times.


@pytest.mark.parametrize("wait", ["a place", "an adapter", "a grammar", "a text", "space"])
@virtual
async def test_a_deadline_that_passes_while_a_job_waits_is_a_408(wait: str) -> None:
    async with opened(
        adapters=PlayedAdapters(1), max_running=1 if wait in ("a place", "space") else 100, max_queue_size=1
    ) as site:
        job: dict[str, Any] = {}
        match wait:
            case "a place":
                holders = [new_job()]
            case "space":
                holders, job = [new_job(), new_job()], {"resumes": True}
            case "an adapter":
                holders, job = [new_job(adapter=WORDS)], {"adapter": SUMS}
            case "a grammar":
                holders, job = [new_job(body=grammar_body(10))], {"body": grammar_body(11)}
            case _:
                holders, job = [new_job(facts=NO_MODEL) for _ in range(STARTING)], {"facts": NO_MODEL}
        tasks = [
            start(site.run(each, 10.0)) if each.facts.runs else start(text(site, each, 10.0))
            for each in holders
        ]
        await blocked()
        late = new_job(queue_timeout_s=3.0, **job)
        if wait == "space":
            # A stream that goes on has no deadline; a further prompt of a list has.
            late = new_job(queue_timeout_s=3.0)
            error = await refused(site.door.further(late, BLOCK, 0))
        else:
            error = await refused(site.door.admit(late))
        assert error.status == 408
        assert now() == pytest.approx(3.0, abs=0.01)
        await asyncio.gather(*tasks)
        site.check_free()


async def text(site: Site, job: Job, seconds: float = 1.0) -> None:
    """Run a job that runs no model."""
    try:
        await site.door.admit(job)
        await asyncio.sleep(seconds)
    finally:
        if job.slot is not None:
            job.slot.release()


# Needs beside cost.


@virtual
async def test_jobs_that_wait_for_an_adapter_hold_no_place() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=4) as site:
        first = start(site.run(new_job(adapter=WORDS), 5.0))
        await blocked()
        others = [start(site.run(new_job(adapter=SUMS))) for _ in range(3)]
        await blocked()
        assert (site.batcher.stats.running, site.batcher.stats.queue_depth) == (1, 3)
        # Requests for the base model pass them by.
        await asyncio.gather(*(site.run(new_job()) for _ in range(3)))
        assert now() == pytest.approx(1.0, abs=0.01)
        await asyncio.gather(first, *others)
        # All three run at once, as soon as the place of the adapter is free.
        assert now() == pytest.approx(6.0, abs=0.01)
        site.check_free()


@virtual
async def test_an_adapter_that_nobody_waits_for_any_more_holds_nobody_up() -> None:
    async with opened(adapters=PlayedAdapters(1)) as site:
        words = [start(site.run(new_job(adapter=WORDS), 10.0))]
        await blocked()
        # The adapter drains for another one, whose only job leaves.
        sums = start(site.run(new_job(adapter=SUMS, queue_timeout_s=2.0)))
        await blocked()
        words.append(start(site.run(new_job(adapter=WORDS), 1.0)))
        await blocked()
        assert site.batcher.stats.running == 1
        assert (await refused(sums)).status == 408
        await words[1]
        assert now() == pytest.approx(3.0, abs=0.01)
        await words[0]
        site.check_free()


@virtual
async def test_an_adapter_that_was_removed_while_a_job_waited_is_a_404() -> None:
    async with opened(adapters=PlayedAdapters(1)) as site:
        first = start(site.run(new_job(adapter=WORDS)))
        await blocked()
        waits = start(site.run(new_job(adapter=SUMS)))
        await blocked()
        del site.adapters.requests[SUMS]
        assert (await refused(waits)).status == 404
        await first
        # A job for an adapter that is not served never waits.
        assert (await refused(site.door.admit(new_job(adapter=SUMS)))).status == 404
        assert site.batcher.stats.total_submitted == 2
        site.check_free()


@virtual
async def test_new_grammars_of_a_tenant_go_one_by_one_and_hold_up_nobody() -> None:
    async with opened() as site:
        slow = [start(site.run(new_job(body=grammar_body(5 + n / 10), tenant="t"))) for n in range(3)]
        await blocked()
        assert (site.batcher.stats.running, site.batcher.stats.queue_depth) == (1, 2)
        # A job without a grammar, and another tenant's grammar.
        await asyncio.gather(site.run(new_job(tenant="t")), site.run(new_job(body=grammar_body(0.5))))
        assert now() == pytest.approx(1.5, abs=0.01)
        await asyncio.gather(*slow)
        # Each was checked while the one before it ran.
        assert now() == pytest.approx(5.0 + 5.1 + 5.2 + 1.0, abs=0.01)
        # A grammar that is known waits for no other.
        again = start(site.run(new_job(body=grammar_body(9))))
        await blocked()
        began = now()
        await site.run(new_job(body=grammar_body(5)))
        assert now() == pytest.approx(began + 1.0, abs=0.01)
        await again
        site.check_free()


@virtual
async def test_new_grammars_of_a_tenant_are_checked_in_the_order_of_the_queue() -> None:
    async with opened() as site:
        tasks = [start(site.run(new_job(body=grammar_body(5))))]
        await blocked()
        tasks += [start(site.run(new_job(body=grammar_body(5 + n)))) for n in range(1, 3)]
        tasks += [start(site.run(new_job(body=grammar_body(2), priority=-1)))]
        await asyncio.gather(*tasks)
        assert site.checked == [5, 2, 6, 7]


@virtual
async def test_a_grammar_that_is_refused_gives_its_slot_back_and_the_next_is_checked() -> None:
    async with opened() as site:
        hostile = start(site.run(new_job(body=grammar_body(-3))))
        next_one = start(site.run(new_job(body=grammar_body(1))))
        assert (await refused(hostile)).status == 400
        await next_one
        site.check_free()


@virtual
async def test_jobs_that_run_no_model_wait_for_no_cache_and_no_adapter() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=1) as site:
        held = start(site.run(new_job(adapter=WORDS), 10.0))
        await blocked()
        jobs = [new_job(facts=NO_MODEL, adapter=SUMS, tenant=str(n)) for n in range(STARTING + 1)]
        await asyncio.gather(*(text(site, job) for job in jobs))
        # One more than run at once.
        assert now() == pytest.approx(2.0, abs=0.01)
        await held
        site.check_free()


@virtual
async def test_live_jobs_whose_prompts_take_long_to_make_hold_up_no_other_live_job() -> None:
    """Such as images, videos and long texts; background jobs whose prompts are made are few."""
    async with opened(capacity=100_000, background=1, max_starting=2) as site:
        live = [new_job(facts={"prompt": None}) for _ in range(20)]
        live += [new_job(), new_job()]
        tasks = [start(site.door.admit(job)) for job in live]
        await blocked()
        assert all(task.done() for task in tasks)
        first, second, third = jobs = [new_job(priority=1) for _ in range(3)]
        tasks = [start(site.door.admit(job)) for job in jobs]
        await blocked()
        assert [task.done() for task in tasks] == [True, True, False]
        held = [start(place(site, first, 5.0))]
        await blocked()
        assert tasks[2].done()
        # Prompts of a list are made already.
        held += [start(place(site, first, 5.0)) for _ in range(5)]
        held += [start(place(site, job, 5.0)) for job in (second, third)]
        await blocked()
        assert site.batcher.stats.background_running == 8
        await asyncio.gather(*held, *(place(site, job) for job in live))
        site.check_free()


async def place(site: Site, job: Job, seconds: float = 1.0, n: int = 1) -> None:
    async with site.door.place(job, BLOCK, 0, n):
        await asyncio.sleep(seconds)


# Further prompts.


@virtual
async def test_a_list_longer_than_the_queue_waits_behind_its_first_prompt() -> None:
    async with opened(max_running=1, max_queue_size=2) as site:
        job = new_job()
        await site.door.admit(job)
        prompts = [start(place(site, job)) for _ in range(50)]
        await blocked()
        stats = site.batcher.stats
        assert (stats.running, stats.queue_depth, stats.outside) == (1, 2, 16 - 2)
        await asyncio.gather(*prompts)
        assert now() == pytest.approx(50.0, abs=0.01)
        site.check_free()


@virtual
async def test_a_list_leaves_space_in_the_queue() -> None:
    async with opened(max_running=4, max_queue_size=100) as site:
        job = new_job(facts={"answers": 2})
        await site.door.admit(job)
        prompts = [start(place(site, job, n=2)) for _ in range(1_000)]
        await blocked()
        assert site.batcher.stats.running == 4
        for tenant in ("acme", "default"):
            await site.run(new_job(tenant=tenant))
        # The list goes on meanwhile, two prompts a second.
        assert sum(prompt.done() for prompt in prompts) >= 2
        for prompt in prompts:
            prompt.cancel()
        await blocked()
        site.check_free()


@virtual
async def test_a_job_that_was_admitted_has_met_its_deadline() -> None:
    async with opened(max_running=1) as site:
        job = new_job(queue_timeout_s=0.5)
        await site.door.admit(job)
        # The second prompt of its list comes later.
        await asyncio.gather(place(site, job), place(site, job))
        assert now() == pytest.approx(2.0, abs=0.01)


@virtual
async def test_a_slot_that_is_too_small_is_not_held_while_the_job_waits_for_another() -> None:
    async with opened(capacity=3 * BLOCK) as site:
        # The body stated one answer, of any length.
        job = new_job(facts={"prompt": None})
        await site.run(job, prompt_tokens=3 * BLOCK, n=3)
        site.check_free()


@virtual
async def test_a_prompt_that_comes_when_its_job_has_ended_does_not_run() -> None:
    async with opened() as site:
        job = new_job()
        await site.door.admit(job)
        assert job.slot
        job.slot.release()
        assert (await refused(place(site, job))).status == 503


@virtual
async def test_a_prompt_outlives_its_job() -> None:
    async with opened() as site:
        job = new_job()
        running = start(site.run(job))
        await blocked()
        assert job.placed
        assert site.batcher.stats.running == 1
        await running
        assert site.batcher.stats.total_completed == 1


# At the end of a job, whatever happens.


def hardest() -> Job:
    return new_job(adapter=WORDS, body=grammar_body(0), facts={"grammar": b"x"})


@virtual
async def test_a_job_that_is_cancelled_at_any_await_leaves_nothing_held() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=1) as site:
        for passes in range(40):
            work = [start(site.run(hardest(), 0.0)) for _ in range(3)]
            # Each pass of the loop is another await of the first job, or of those behind it.
            for _ in range(passes):
                await asyncio.sleep(0)
            for each in work[: 1 + passes % 3]:
                each.cancel()
            await asyncio.wait(work)
            site.check_free()


@pytest.mark.parametrize("failure", [ValueError("oh"), asyncio.CancelledError(), GeneratorExit()])
@virtual
async def test_a_prompt_that_fails_gives_its_slot_back_and_is_counted(failure: BaseException) -> None:
    async with opened() as site:
        with pytest.raises(type(failure)):
            async with site.placed(hardest()):
                raise failure
        stats = site.batcher.stats
        assert (stats.total_failed, stats.total_cancelled) == (
            (1, 0) if isinstance(failure, ValueError) else (0, 1)
        )
        site.check_free()


@dataclass(frozen=True)
class Ask:
    """One job of a schedule; times are in tenths of a second."""

    at: int
    adapter: str
    grammar: int | None
    prompts: int
    answers: int
    more: int
    tenant: str
    priority: int
    run: int
    timeout: int | None
    leaves: int | None


ASKS = st.builds(
    Ask,
    at=st.integers(0, 20),
    adapter=st.sampled_from(["", "", WORDS, SUMS, "demo:third"]),
    # A few grammars come again, and some are refused.
    grammar=st.one_of(st.none(), st.sampled_from([0, 3, 7, 11, -2])),
    prompts=st.integers(1, 4),
    answers=st.integers(1, 3),
    # Some bodies state fewer answers than vLLM finds.
    more=st.sampled_from([0, 0, 0, 1]),
    tenant=st.sampled_from(["default", "acme"]),
    priority=st.integers(-1, 1),
    run=st.integers(0, 10),
    timeout=st.one_of(st.none(), st.integers(1, 20)),
    leaves=st.one_of(st.none(), st.integers(0, 20)),
)


class Schedule:
    """Runs jobs against a door, and checks at each moment that every slot that is taken runs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.jobs: list[Job] = []
        self.outcomes: list[object] = []
        self.working: dict[Job, int] = {}

    def check(self) -> None:
        """Check a moment in which all tasks are blocked."""
        site = self.site
        stats = site.batcher.stats
        records = 0
        for job in self.jobs:
            # A job whose grammar is being checked runs: one of each tenant.
            checks = job.slot is not None and job.slot.running and not job.placed
            records += self.working.get(job, 0) + (job.facts.answers if checks else 0)
        checking = [job for job in self.jobs if job.slot is not None and job.slot.running and not job.placed]
        assert len(checking) == len(site.checking) == len(set(site.checking))
        assert stats.running == records, "a slot that is taken does not run"
        running = {job.request.adapter for job in self.jobs if self.working.get(job)} - {""}
        assert len(running) <= site.adapters.slots.count
        # A few waiting prompts of a job are outside the queue's bounds.
        assert stats.outside <= sum(16 * job.facts.answers + 1 for job in self.jobs if job.placed)

    async def ask(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at / 10)
        facts: dict[str, Any] = {"answers": ask.answers}
        body: dict[str, Any] = {} if ask.grammar is None else {"body": grammar_body(ask.grammar / 10)}
        job = new_job(
            facts=facts,
            adapter=ask.adapter,
            tenant=ask.tenant,
            priority=ask.priority,
            queue_timeout_s=None if ask.timeout is None else ask.timeout / 10,
            **body,
        )
        self.jobs.append(job)
        began = now()
        outcome: object = "ok"
        work = start(self._work(job, ask))
        if ask.leaves is not None:
            await asyncio.wait([work], timeout=ask.leaves / 10)
            work.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])
        if work.cancelled():
            outcome = "left"
        elif error := work.exception():
            assert isinstance(error, RequestError)
            outcome = error.status
            allowed = {429, 404 if ask.adapter else 429, 400 if (ask.grammar or 0) < 0 else 429}
            if ask.timeout is not None:
                allowed |= {408}
                assert outcome != 408 or now() <= began + ask.timeout / 10 + 0.01
            assert outcome in allowed
        self.outcomes.append(outcome)

    async def _work(self, job: Job, ask: Ask) -> None:
        try:
            await self.site.door.admit(job)
            await self.site.check(job)
            async with asyncio.TaskGroup() as group:
                for _ in range(ask.prompts):
                    group.create_task(self._prompt(job, ask))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        finally:
            if job.slot is not None and not job.placed:
                job.slot.release()

    async def _prompt(self, job: Job, ask: Ask) -> None:
        n = ask.answers + ask.more
        async with self.site.door.place(job, n * BLOCK, n * BLOCK, n):
            self.working[job] = self.working.get(job, 0) + n
            try:
                await asyncio.sleep(ask.run / 10)
            finally:
                self.working[job] -= n


@given(
    asks=st.lists(ASKS, min_size=1, max_size=14),
    slots=st.integers(1, 2),
    places=st.integers(4, 6),
    queue=st.integers(1, 8),
    removed=st.one_of(st.none(), st.integers(0, 20)),
)
def test_every_slot_that_is_taken_runs(
    asks: list[Ask], slots: int, places: int, queue: int, removed: int | None
) -> None:
    async def run() -> None:
        adapters = PlayedAdapters(slots, (WORDS, SUMS, "demo:third"))
        async with opened(
            capacity=12 * BLOCK, adapters=adapters, places=places, max_queue_size=queue
        ) as site:
            schedule = Schedule(site)
            tasks = [start(schedule.ask(ask)) for ask in asks]
            if removed is not None:
                asyncio.get_running_loop().call_later(removed / 10, adapters.requests.pop, WORDS)
            # Between the moments at which anything happens.
            await asyncio.sleep(0.05)
            while not all(task.done() for task in tasks):
                schedule.check()
                await asyncio.sleep(0.1)
            await asyncio.gather(*tasks)
            assert len(schedule.outcomes) == len(asks)
            site.check_free()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
