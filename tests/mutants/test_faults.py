"""Protects `make mutants`: a fault is in its place or gone, and the rest of a file stays as it is."""

from pathlib import Path

from tests.mutants.faults import ROOMS, Fault, at_random, find, put, read

CODE = """class Queue:
    def take(self):
        if self.full and self.full:
            return None
        return self.first()
"""


def test_a_fault_changes_one_place_of_its_function(tmp_path: Path) -> None:
    (tmp_path / "batcher").mkdir()
    (tmp_path / "batcher/queue.py").write_text(CODE)
    second = Fault("batcher/queue.py", "Queue.take", "self.full", "True", 2)
    assert put(second, tmp_path) == CODE.replace("and self.full", "and True")
    assert put(Fault("batcher/queue.py", "Queue.put", "self.full", "True"), tmp_path) is None
    moved = Fault("batcher/gone.py", "Queue.take", "self.full", "True", 2)
    assert find(moved, tmp_path) == second
    assert at_random("batcher", tmp_path, "1", {second.place}) is None
    assert (other := at_random("batcher", tmp_path, "1", set())) is not None
    assert put(other, tmp_path) not in (None, CODE)


def test_the_list_of_faults_is_read_as_it_is_written() -> None:
    text = Path(__file__).with_name("faults.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    faults = read(Path(__file__).with_name("faults.txt"))
    assert list(map(str, faults)) == lines
    assert all(fault.room in ROOMS for fault in faults)
