from serve_app.jobs.models import ENDED, STATES, TRANSITIONS, State


def test_every_state_has_its_ways() -> None:
    assert set(TRANSITIONS) == set(STATES)
    assert {"completed", "failed", "expired", "cancelled"} == ENDED


def test_every_open_state_leads_to_an_end() -> None:
    for state in set(STATES) - ENDED:
        reached: set[State] = set()
        todo = [state]
        while todo:
            for after in TRANSITIONS[todo.pop()] - reached:
                reached.add(after)
                todo.append(after)
        assert reached & ENDED, state
        assert state not in reached, f"{state} is reached again"
