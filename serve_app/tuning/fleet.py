"""A model of replicas behind an Ingress, in virtual time."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Literal

from serve_app.ingress.replica_choice import AHEAD, SLACK_TOKENS
from serve_app.simulation.profiles import Profile
from serve_app.tuning.replica import IDLE, Replica, Request, Settings
from serve_app.tuning.workload import Arrival, Workload

Routing = Literal["prefix", "least_loaded"]

MARGINS: dict[Routing, float] = {"prefix": AHEAD * SLACK_TOKENS, "least_loaded": 0.0}
"""Tokens by which the first of the two replicas that a request draws may be ahead of the second, and is taken
nevertheless. With `prefix`, requests that share nothing draw both by the hash of their prompt."""

_end = attrgetter("ends_at")


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        requests: The requests that count, complete, in the order in which they were sent.
        sent: Requests that were sent, with those that don't count.
        ended: Requests that are complete; the others still ran when the last one that counts had ended.
        in_flight: Those that still ran.
        seconds: Virtual time from the first to the last request that counts, as they were sent.
        busy: Share of the time in which steps ran, mean of the replicas.
        held: Share of the KV cache that was reserved, mean of the replicas and of the time.
        most_held: The most tokens that a replica has reserved.
        most_running: The most requests in a step of a replica.
    """

    requests: Sequence[Request]
    sent: int
    ended: int
    in_flight: int
    seconds: float
    busy: float
    held: float
    most_held: int
    most_running: int


class Fleet:
    """Replicas with the same settings, and the router in front of them.

    Args:
        profile: The device of each replica.
        settings: Settings of each replica.
        replicas: How many there are.
        workload: The requests, for what each reserves.
        routing: The model's `routing`.
    """

    def __init__(
        self,
        profile: Profile,
        settings: Settings,
        replicas: int,
        workload: Workload,
        routing: Routing = "prefix",
    ) -> None:
        self._request_s = profile.request_ms / 1e3
        self._kv_tokens = profile.kv_tokens
        self._workload = workload
        self._margin = MARGINS[routing]
        mean = workload.output.expected
        self.replicas = [Replica(profile, settings, mean) for _ in range(replicas)]
        self._place: dict[Request, Replica] = {}

    def run(
        self,
        requests: Iterable[Request],
        counts: range,
        follow: Callable[[Request, float], Iterable[Request]] | None = None,
    ) -> Run:
        """Run requests until all that count are complete.

        Args:
            requests: The requests, in the order in which they are sent.
            counts: The numbers of those that count.
            follow: Returns the requests that are sent because one has ended, at that time; None: none are.
        """
        replicas, delay = self.replicas, self._request_s
        source, coming = iter(requests), deque[Request]()
        if follow is not None:
            coming.extend(source)
        left, sent, ended, now = len(counts), 0, 0, 0.0
        found: list[Request] = []
        while left:
            if not coming:
                coming.extend(islice(source, 64))
            replica = min(replicas, key=_end)
            # The way to the engine takes each request the same time.
            at = coming[0].sent_at + delay if coming else IDLE
            if at < replica.ends_at:
                now = at
                request = coming.popleft()
                sent += 1
                self._route(request).arrive(request, now)
                continue
            if replica.ends_at == IDLE:
                raise AssertionError("requests that count were never sent")
            now = replica.ends_at
            for request in replica.end_block():
                ended += 1
                self._place.pop(request).load -= request.reserved
                if request.number in counts:
                    left -= 1
                    found.append(request)
                if follow is not None:
                    coming.extend(follow(request, now))
        found.sort(key=attrgetter("number"))
        times = now * len(replicas)
        return Run(
            requests=found,
            sent=sent,
            ended=ended,
            in_flight=len(self._place),
            seconds=found[-1].sent_at - found[0].sent_at,
            busy=sum(each.busy_s for each in replicas) / times,
            held=sum(each.held_s for each in replicas) / times / self._kv_tokens,
            most_held=max(each.most_held for each in replicas),
            most_running=max(each.most_running for each in replicas),
        )

    def _route(self, request: Request) -> Replica:
        """Choose the replica of a request, and count it there."""
        replicas = self.replicas
        chosen = replicas[0]
        if (count := len(replicas)) > 1:
            place = request.route * count
            number = int(place)
            first = replicas[number]
            other = int((place - number) * (count - 1))
            second = replicas[other if other < number else other + 1]
            chosen = first if first.load <= second.load + self._margin else second
        chosen.load += request.reserved
        self._place[request] = chosen
        return chosen


def open_loop(fleet: Fleet, workload: Workload, seed: int, *, rate: float, warm_up: int, counted: int) -> Run:
    """Run requests that come at random, independently of the answers.

    Args:
        fleet: The replicas.
        workload: The requests.
        seed: Of the random numbers; the same numbers are drawn for every fleet and every rate.
        rate: Requests per second, in place of those of the workload.
        warm_up: Requests before those that count.
        counted: Requests that count. Others follow until they are complete.
    """

    def requests() -> Iterable[Request]:
        at = 0.0
        for number, draw in enumerate(workload.draws(seed)):
            at += draw.gap / rate
            yield _request(workload, number, at, draw.prompt, draw.output, draw.route)

    return fleet.run(requests(), range(warm_up, warm_up + counted))


def replay(
    fleet: Fleet, workload: Workload, arrivals: Iterable[Arrival], *, seconds: float, seed: int = 0
) -> Run:
    """Run requests that are given, such as those that a service got, in place of random ones.

    Args:
        fleet: The replicas.
        workload: The requests, for the share of a prompt that is in the prefix cache.
        arrivals: The requests, in the order in which they are sent; each reserves what its answer takes.
        seconds: Those that are sent before this time count; the others follow until these are complete.
        seed: Of the random numbers for the choice of a replica.

    Raises:
        ValueError: No request counts.
    """
    source = iter(arrivals)
    first: list[Arrival] = []
    for arrival in source:
        first.append(arrival)
        if arrival.at_s >= seconds:
            break
    counted = sum(each.at_s < seconds for each in first)
    if not counted:
        raise ValueError(f"no request is sent in the first {seconds:g} s; raise the rate or the seconds")
    numbers = random.Random(seed)
    requests = (
        Request(number, at, prompt, workload.computed(prompt), output, prompt + output, numbers.random())
        for number, (at, prompt, output) in enumerate(chain(first, source))
    )
    return fleet.run(requests, range(counted))


def closed_loop(
    fleet: Fleet,
    workload: Workload,
    seed: int,
    *,
    streams: int,
    requests: int,
    chunk: int = 1,
    warm_up: int = 0,
) -> Run:
    """Run clients that send the next call when the one before is answered.

    Args:
        fleet: The replicas.
        workload: The requests; their rate doesn't matter.
        seed: Of the random numbers.
        streams: Clients.
        requests: Requests of all of them, with those of the warm-up.
        chunk: Requests in a call, which is answered when all of them are.
        warm_up: The first requests, which don't count.
    """
    draws = enumerate(islice(workload.draws(seed), requests))
    calls: dict[Request, list[int]] = {}

    def call(at: float) -> list[Request]:
        made = [
            _request(workload, number, at, draw.prompt, draw.output, draw.route)
            for number, draw in islice(draws, chunk)
        ]
        left = [len(made)]
        calls.update((request, left) for request in made)
        return made

    def follow(request: Request, now: float) -> list[Request]:
        left = calls.pop(request)
        left[0] -= 1
        return [] if left[0] else call(now)

    first = [request for _ in range(streams) for request in call(0.0)]
    return fleet.run(first, range(warm_up, requests), follow)


def _request(workload: Workload, number: int, at: float, prompt: int, output: int, route: float) -> Request:
    reserved = prompt + workload.max_tokens
    return Request(number, at, prompt, workload.computed(prompt), output, reserved, route)
