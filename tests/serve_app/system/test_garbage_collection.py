import gc

from serve_app.system.garbage_collection import THRESHOLDS, quiet_collection


def test_what_exists_is_excluded_and_later_garbage_is_not() -> None:
    before = gc.get_threshold()
    quiet_collection()
    try:
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == THRESHOLDS
        later: list[object] = []
        later.append(later)
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
