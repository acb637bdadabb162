import gc

from serve_app.system.garbage_collection import THRESHOLDS, collect_rarely


def test_collections_become_rare_and_go_on() -> None:
    before = gc.get_threshold()
    # Another test may have called it.
    gc.set_threshold(700, 10, 10)
    collect_rarely()
    try:
        assert gc.get_threshold() == THRESHOLDS
        done = gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(2 * THRESHOLDS[0])]
        assert gc.get_stats()[0]["collections"] > done
        assert len(kept) == 2 * THRESHOLDS[0]
    finally:
        gc.set_threshold(*before)
