"""A model of a device on which several models are served, in virtual time: steps, sleeps and wake-ups."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from serve_app.settings.turns import ShareSettings
from serve_app.simulation.profiles import Profile, Work
from serve_app.turns.rota import Entry, State, follow

LOOK_S = 0.1
"""Seconds between two looks of an engine."""


@dataclass(slots=True)
class Request:
    """A request.

    Attributes:
        model: Its model.
        at: When it comes.
        prompt: Tokens of its prompt.
        output: Tokens of its answer.
        first_at: When its first token was there.
        made: Tokens of its answer so far.
    """

    model: str
    at: float
    prompt: int
    output: int
    first_at: float = 0.0
    made: int = 0


@dataclass(slots=True)
class Span:
    """What the device did in a span of time: it "serves", "stops" (only ends what runs) or "switches"."""

    what: str
    model: str
    began: float
    ended: float


class Engine:
    """One model's queue, and what runs of it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.since: float | None = None
        self.done = 0

    @property
    def busy(self) -> bool:
        """True if something runs or waits."""
        return bool(self.queue or self.running)

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return sum(one.prompt + one.output for one in self.queue)

    def step(self, now: float, starts: bool, slowdown: float = 1.0) -> float:
        """Make a step, and return when it ends."""
        profile = self._profile
        prefill = 0
        held = sum(one.prompt + one.output for one in self.running)
        while starts and self.queue and len(self.running) < profile.max_num_seqs:
            size = self.queue[0].prompt + self.queue[0].output
            if held + size > profile.kv_tokens:
                break
            if prefill + self.queue[0].prompt > profile.max_num_batched_tokens:
                break
            held += size
            prefill += self.queue[0].prompt
            self.running.append(self.queue.popleft())
        context = sum(one.prompt + one.made for one in self.running)
        ends = now + slowdown * profile.step.seconds(Work(prefill, len(self.running), context))
        for one in self.running:
            one.first_at = one.first_at or ends
            one.made += 1
        self.done += len(self.running)
        self.running = [one for one in self.running if one.made < one.output]
        return ends


class ByRota:
    """The rule of the service: each engine looks every 0.1 s.

    Attributes:
        took: Seconds of the last sleep and wake-up of each engine.
        drain_s: The longest wait for running requests, in seconds.
    """

    def __init__(self, min_turn_s: float, max_wait_s: float) -> None:
        self._settings = ShareSettings(min_turn_s=min_turn_s, max_wait_s=max_wait_s)
        self._entries: dict[str, Entry] = {}
        self._stopped = 0.0
        self.took: dict[str, tuple[float, float]] = {}
        self.drain_s = 0.0

    def choose(self, now: float, state: dict[str, State], engines: dict[str, Engine]) -> str | None:
        """Look for each engine, and return the engine that has the device."""
        yours = None
        for name, engine in engines.items():
            before = self._entries.get(name) or Entry("g", ("gpu",), "asleep", now)
            sleep_s, wake_s = self.took.get(name, (0.0, 0.0))
            own = replace(
                before,
                state=state[name],
                at=now,
                busy=engine.busy,
                tokens=engine.tokens,
                since=engine.since,
                left_s=10.0 if engine.queue else 0.0,
                drain_s=self.drain_s,
                sleep_s=sleep_s,
                wake_s=wake_s,
            )
            if own.state == "awake" and before.state == "waking":
                own = replace(own, began=now)
            elif own.state == "asleep" and before.state == "draining":
                own = replace(own, freed=now)
                self.drain_s = max(self.drain_s, now - sleep_s - self._stopped)
            others = {other: entry for other, entry in self._entries.items() if other != name}
            self._entries[name] = following = follow(now, name, own, others, self._settings).entry
            if following.state == "draining" and own.state == "awake":
                self._stopped = now
            if following.state in {"awake", "waking"}:
                yours = name
        return yours


class OnDemand:
    """Switches whenever a request for a model that sleeps comes: the oldest request that waits is next."""

    def __init__(self) -> None:
        self.took: dict[str, tuple[float, float]] = {}

    def choose(self, now: float, state: dict[str, State], engines: dict[str, Engine]) -> str | None:
        """Return the model of the oldest request that waits; the one that is awake if none does."""
        waiting = [(engine.queue[0].at, name) for name, engine in engines.items() if engine.queue]
        if waiting:
            return min(waiting)[1]
        return next((name for name in state if state[name] != "asleep"), None)


@dataclass
class Run:
    """The result of a run.

    Attributes:
        requests: The requests, with their times.
        spans: What the device did.
        serving_s: Seconds in which steps ran; of static parts, the mean of the parts.
        needed_s: Seconds in which there was work, on any part.
        switches: Switches.
    """

    requests: Sequence[Request]
    spans: list[Span] = field(default_factory=list)
    serving_s: float = 0.0
    needed_s: float = 0.0
    switches: int = 0

    @property
    def share(self) -> float:
        """Share of the time with work in which steps ran."""
        return self.serving_s / self.needed_s

    def ttft_s(self, quantile: float) -> float:
        """Return a quantile of the seconds from arrival to the first token."""
        waits = sorted(one.first_at - one.at for one in self.requests)
        return waits[int(quantile * (len(waits) - 1))]

    @property
    def ended_at(self) -> float:
        """When the last first token was there."""
        return max(one.first_at for one in self.requests)


def bursts(models: Sequence[str], seconds: float, load: float, draw: random.Random) -> list[Request]:
    """Return requests that come in bursts, with a few in between.

    Args:
        models: Names of the models.
        seconds: Time in which they come.
        load: Requests per second, of all models together, on average.
        draw: Random numbers.
    """
    requests = []
    for model in models:
        rate = load / len(models)
        # A tenth comes by itself, the others in bursts of two seconds, 12 s apart on average.
        size = 0.9 * rate * 12.0
        times = []
        at = draw.expovariate(1 / 6.0)
        while at < seconds:
            times += [at + draw.uniform(0.0, 2.0) for _ in range(round(size * draw.uniform(0.5, 1.5)))]
            at += draw.expovariate(1 / 12.0)
        at = draw.expovariate(0.1 * rate)
        while at < seconds:
            times.append(at)
            at += draw.expovariate(0.1 * rate)
        requests += [
            Request(model, at, draw.randint(100, 1_000), draw.randint(32, 256))
            for at in times
            if at < seconds
        ]
    return sorted(requests, key=lambda one: one.at)


def take_turns(requests: Sequence[Request], profile: Profile, chooser: ByRota | OnDemand) -> Run:
    """Serve requests on one device whose models sleep and wake up, as a chooser says."""
    names = sorted({one.model for one in requests})
    engines = {name: Engine(profile) for name in names}
    state: dict[str, State] = dict.fromkeys(names, "asleep")
    arrivals = deque(requests)
    run = Run(requests)
    now, looked_at, awake, chosen = 0.0, float("-inf"), "", ""
    while arrivals or any(engine.busy for engine in engines.values()):
        while arrivals and arrivals[0].at <= now:
            one = arrivals.popleft()
            engines[one.model].queue.append(one)
        for name, engine in engines.items():
            if state[name] in {"awake", "waking"} or not engine.queue:
                engine.since = None
            elif engine.since is None:
                engine.since = now
        changed = False
        if now - looked_at >= LOOK_S:
            looked_at = now
            chosen = chooser.choose(now, state, engines) or ""
            if awake:
                state[awake] = "awake" if chosen == awake else "draining"
        ends = now
        if awake and state[awake] == "draining" and not engines[awake].running:
            ends = now + profile.sleep_s
            state[awake] = "asleep"
            chooser.took[awake] = (profile.sleep_s, chooser.took.get(awake, (0.0, 0.0))[1])
            run.spans.append(Span("switches", awake, now, ends))
            awake, changed = "", True
        elif not awake and chosen:
            awake = chosen
            state[awake] = "waking"
            chooser.choose(now, state, engines)
            ends = now + profile.wake_s
            run.spans.append(Span("switches", awake, now, ends))
            chooser.took[awake] = (chooser.took.get(awake, (0.0, 0.0))[0], profile.wake_s)
            state[awake] = "awake"
            run.switches += 1
            changed = True
        elif awake and engines[awake].busy and (state[awake] == "awake" or engines[awake].running):
            ends = engines[awake].step(now, state[awake] == "awake")
            run.serving_s += ends - now
            _extend(run.spans, "serves" if state[awake] == "awake" else "stops", awake, now, ends)
        if changed:
            looked_at = float("-inf")
        busy = any(engine.busy for engine in engines.values())
        if ends == now:
            # Nothing to do until the next report, or the next request.
            following = looked_at + LOOK_S if busy else arrivals[0].at if arrivals else now
            ends = max(following, now + 1e-6)
        if busy:
            run.needed_s += ends - now
        now = ends
    return run


def static_parts(requests: Sequence[Request], profile: Profile) -> Run:
    """Serve the requests of each model on a part of a device of its own, all parts equally slow."""
    names = sorted({one.model for one in requests})
    run = Run(requests)
    for name in names:
        engine = Engine(profile.model_copy(update={"kv_tokens": profile.kv_tokens // len(names)}))
        arrivals = deque(one for one in requests if one.model == name)
        now = 0.0
        while arrivals or engine.busy:
            while arrivals and arrivals[0].at <= now:
                engine.queue.append(arrivals.popleft())
            if engine.busy:
                ends = engine.step(now, True, float(len(names)))
                run.serving_s += (ends - now) / len(names)
                _extend(run.spans, "serves", name, now, ends)
                now = ends
            else:
                now = arrivals[0].at
    reached = 0.0
    for span in sorted(run.spans, key=lambda span: span.began):
        run.needed_s += max(0.0, span.ended - max(reached, span.began))
        reached = max(reached, span.ended)
    return run


def _extend(spans: list[Span], what: str, model: str, began: float, ended: float) -> None:
    last = spans[-1] if spans else None
    if last and (last.what, last.model) == (what, model) and began - last.ended < 1e-9:
        last.ended = ended
    else:
        spans.append(Span(what, model, began, ended))
