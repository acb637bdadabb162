"""Adapters and replicas: how often an engine has to load one, by the choice of the replica."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaChoice, ReplicaState

SLOTS = 8
ADAPTERS = [f"demo:{number}" for number in range(32)]
WEIGHTS = [1 / (rank + 1) ** 1.2 for rank in range(len(ADAPTERS))]
"""Zipf's law: the eight most popular ones get 75% of the requests."""

IN_FLIGHT = 16
REPORT_EVERY = 50


class Slots:
    """The adapters of a replica, of which the least recently used goes first."""

    def __init__(self) -> None:
        self.resident: OrderedDict[str, None] = OrderedDict()
        self.loads = 0

    def use(self, adapter: str) -> None:
        if adapter not in self.resident:
            self.loads += 1
            if len(self.resident) >= SLOTS:
                self.resident.popitem(last=False)
        self.resident[adapter] = None
        self.resident.move_to_end(adapter)


def states(replicas: dict[str, Slots]) -> dict[str, ReplicaState]:
    return {
        name: ReplicaState(adapters=tuple(slots.resident), slots=SLOTS) for name, slots in replicas.items()
    }


def run(choose: Callable[[str], tuple[str, Callable[[], None]]], replicas: dict[str, Slots]) -> Counter[str]:
    """Send requests, of which some are always in flight; return how many each replica got."""
    draw = random.Random(7)
    sent: Counter[str] = Counter()
    running: list[Callable[[], None]] = []
    for adapter in draw.choices(ADAPTERS, WEIGHTS, k=5_000):
        name, end = choose(adapter)
        replicas[name].use(adapter)
        sent[name] += 1
        running.append(end)
        if len(running) > IN_FLIGHT:
            running.pop(draw.randrange(len(running)))()
    return sent


def loads(replicas: dict[str, Slots]) -> int:
    return sum(slots.loads for slots in replicas.values())


def chosen_loads(count: int = 2, callers: int = 1) -> tuple[int, Counter[str]]:
    """Return the loads where `callers` choose by what the replicas hold, and the requests of each."""
    replicas = {f"r{number}": Slots() for number in range(count)}
    choices = [ReplicaChoice(draw=random.Random(seed)) for seed in range(callers)]
    draw = random.Random(3)
    asked = 0

    def choose(adapter: str) -> tuple[str, Callable[[], None]]:
        nonlocal asked
        if asked % REPORT_EVERY == 0:
            for choice in choices:
                choice.update(states(replicas))
        asked += 1
        choice, charge = draw.choice(choices), ReplicaCharge()
        name = choice.choose((), adapter=adapter)
        choice.send(charge, name, (), 256, adapter)
        return name, charge.release

    sent = run(choose, replicas)
    return loads(replicas), sent


def random_loads(count: int = 2) -> int:
    replicas = {f"r{number}": Slots() for number in range(count)}
    draw = random.Random(3)
    run(lambda adapter: (draw.choice(list(replicas)), lambda: None), replicas)
    return loads(replicas)


def test_two_replicas_load_adapters_half_as_often_as_with_a_random_choice() -> None:
    found, sent = chosen_loads()
    assert found <= random_loads() / 2
    # Neither replica is left to idle.
    assert min(sent.values()) >= 0.25 * sum(sent.values())


def test_callers_that_do_not_know_of_each_other_agree() -> None:
    found, _ = chosen_loads(callers=3)
    assert found <= random_loads() / 2


def test_an_adapter_goes_where_it_is_loaded_unless_that_replica_is_too_loaded() -> None:
    choice = ReplicaChoice(draw=random.Random(1))
    choice.update({"a": ReplicaState(adapters=("x",)), "b": ReplicaState()})
    assert {choice.choose((), adapter="x") for _ in range(20)} == {"a"}
    choice.send(ReplicaCharge(), "a", (), 10_000_000)
    assert choice.choose((), adapter="x") == "b"
    assert choice.choose((), avoid=["b"], adapter="x") == "a"


def test_without_an_adapter_the_load_decides_as_before() -> None:
    choice = ReplicaChoice(draw=random.Random(1))
    choice.update({"a": ReplicaState(adapters=("x",)), "b": ReplicaState()})
    choice.send(ReplicaCharge(), "a", (), 100)
    assert choice.choose(()) == "b"


def test_an_adapter_whose_own_replicas_are_too_loaded_goes_by_load() -> None:
    def policy(**loads: int) -> ReplicaChoice:
        choice = ReplicaChoice(draw=random.Random(1))
        choice.update({name: ReplicaState() for name in "abcd"})
        for name, tokens in loads.items():
            choice.send(ReplicaCharge(), name, (), tokens)
        return choice

    def drawn(adapter: str) -> set[str]:
        """Return the two replicas that an adapter's hash draws."""
        first = policy().choose((), adapter=adapter)
        return {first, policy(**{first: 10_000}).choose((), adapter=adapter)}

    adapter = next(adapter for adapter in ADAPTERS if drawn(adapter) == {"c", "d"})
    loaded = policy(a=10_000, c=10_000_000, d=10_000_000)
    chosen = Counter(loaded.choose((), adapter=adapter) for _ in range(200))
    assert chosen["b"] > chosen["a"] == chosen.total() - chosen["b"]
