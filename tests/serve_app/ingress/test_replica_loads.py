"""Tokens of one caller on each replica."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ingress.replica_loads import UNTAKEN_S, Charge, ReplicaLoads


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loads(*names: str, clock: Clock | None = None) -> ReplicaLoads:
    made = ReplicaLoads(clock or Clock())
    for name in names:
        made.add(name)
    return made


def test_a_call_counts_from_its_choice_to_its_end() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    one.charge("y", "a", 5)
    assert one.tokens == {"a": 15, "b": 0}
    one.end("x", "a")
    one.end("x", "a")
    one.end("unknown", "a")
    assert one.tokens == {"a": 5, "b": 0}


def test_a_call_that_went_elsewhere_counts_there() -> None:
    one = loads("a", "b")
    charge = one.charge("x", "a", 10)
    one.move(charge, "b")
    assert one.tokens == {"a": 0, "b": 10}
    one.end("x", "a")
    assert one.tokens == {"a": 0, "b": 10}
    one.end("x", "b")
    one.move(charge, "a")
    assert one.tokens == {"a": 0, "b": 0}


def test_calls_that_share_a_prefix_are_counted_where_they_are() -> None:
    one = loads("a", "b")
    first = one.charge("x", "a", 10, chunk=5)
    one.charge("y", "a", 10, chunk=5)
    one.charge("z", "a", 10, chunk=6)
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (2, 0)
    one.move(first, "b")
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (1, 1)
    one.end("x", "b")
    one.remove("a")
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (0, 0)


def test_calls_with_one_id_end_one_by_one() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    one.charge("x", "a", 10)
    one.charge("x", "b", 7)
    one.end("x", "a")
    assert one.tokens == {"a": 10, "b": 7}


def test_a_call_that_no_replica_took_is_given_up() -> None:
    clock = Clock()
    one = loads("a", clock=clock)
    one.charge("taken", "a", 1)
    one.take("taken", "a")
    one.charge("left", "a", 10)
    clock.now = UNTAKEN_S + 1
    one.charge("new", "a", 100)
    assert one.tokens == {"a": 101}


def test_one_of_several_calls_with_one_id_that_no_replica_took_is_given_up() -> None:
    clock = Clock()
    one = loads("a", clock=clock)
    one.charge("x", "a", 10)
    one.charge("x", "a", 10)
    # The caller of the other one has left before a replica had it.
    one.take("x", "a")
    one.end("x", "a")
    clock.now = UNTAKEN_S + 1
    one.charge("new", "a", 100)
    assert one.tokens == {"a": 100}


def test_the_calls_of_a_replica_go_with_it() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    late = one.charge("y", "b", 5)
    one.remove("a")
    one.add("a")
    one.end("x", "a")
    one.move(late, "gone")
    one.end("y", "gone")
    assert one.tokens == {"a": 0, "b": 0}
    assert one.share() == 1.0


def test_the_share_of_the_traffic_is_that_of_the_reports() -> None:
    one = loads("a", "b")
    assert one.share() == 1.0
    one.charge("x", "a", 25)
    one.reported.update(a=60, b=40)
    assert one.share() == 0.25
    one.charge("y", "b", 100)
    # The reports are older than what was sent.
    assert one.share() == 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["charge", "end", "move", "release", "flap"]), st.integers(0, 9))))
def test_tokens_are_those_of_the_calls_that_run(steps: list[tuple[str, int]]) -> None:
    one = loads("a", "b")
    running: list[Charge] = []
    for act, number in steps:
        name = "ab"[number % 2]
        if act == "charge":
            running.append(one.charge(str(number), name, number + 1))
        elif act == "flap":
            one.remove(name)
            one.add(name)
            running = [charge for charge in running if charge.replica != name]
        elif running:
            charge = running[number % len(running)]
            if act == "move":
                one.move(charge, name)
                continue
            if act == "end":
                ended = next(
                    each for each in running if each.call == charge.call and each.replica == charge.replica
                )
                one.end(charge.call, charge.replica)
                running.remove(ended)
            else:
                one.release(charge)
                running.remove(charge)
        assert one.tokens == {
            name: sum(charge.tokens for charge in running if charge.replica == name) for name in "ab"
        }
