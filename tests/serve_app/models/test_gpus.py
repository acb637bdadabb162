"""GPUs of the table that `nvidia-smi` prints."""

import pytest

from serve_app.models.gpus import GPU, MIB, QUERY, read_gpus, visible_gpus

TABLE = """\
0, GPU-0aaa, NVIDIA H100 80GB HBM3, 81559, 520, 40000, 41039, 9.0, Disabled
1, GPU-1aaa, NVIDIA GB10, [N/A], [N/A], [N/A], [N/A], [N/A], Enabled
"""


def test_each_line_is_a_gpu() -> None:
    first, second = read_gpus(TABLE)
    size = (81559 * MIB, 520 * MIB, 40000 * MIB, 41039 * MIB)
    assert first == GPU("0", "GPU-0aaa", "NVIDIA H100 80GB HBM3", *size, 9.0, False)
    assert second == GPU("1", "GPU-1aaa", "NVIDIA GB10", None, 0, 0, None, None, True)


def test_the_query_asks_for_the_fields_of_a_line() -> None:
    assert QUERY[1].count(",") == TABLE.splitlines()[0].count(",")


@pytest.mark.parametrize("table", ["", "No devices were found\n"])
def test_a_text_without_rows_has_no_gpus(table: str) -> None:
    assert read_gpus(table) == []


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (None, "01"),
        ("", ""),
        ("-1", ""),
        ("1", "1"),
        ("1,0", "10"),
        ("0,7,1", "0"),
        ("GPU-1", "1"),
        ("GPU-", ""),
    ],
)
def test_names_show_gpus_as_in_cuda(names: str | None, shown: str) -> None:
    assert "".join(gpu.number for gpu in visible_gpus(read_gpus(TABLE), names)) == shown
