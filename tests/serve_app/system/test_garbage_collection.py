import gc

from serve_app.system.garbage_collection import freeze_heap


def test_what_exists_is_excluded_and_later_garbage_is_not() -> None:
    freeze_heap()
    try:
        assert gc.get_freeze_count() > 1000
        later: list[object] = []
        later.append(later)
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
