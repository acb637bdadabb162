"""The chart of the loads that were measured."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.tuning.plots import PlotError, check_plot, draw_tuning
from tests.serve_app.tuning.loads import point, tuning

PNG = b"\x89PNG"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The figures that are drawn."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    close, figures = pyplot.close, list[Any]()
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    close("all")


def test_a_chart_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlotError, match=r"matplotlib is missing; install the extra plot: pip install"):
        check_plot()


def test_each_goal_has_a_panel_with_its_figures_and_its_bound(drawn: list[Any], tmp_path: Path) -> None:
    draw_tuning(tuning(), tmp_path / "chart.png")
    (figure,) = drawn
    ttft, latency = figure.axes
    assert [ttft.get_ylabel(), latency.get_ylabel()] == ["ttft_p99 (s)", "latency_p95 (s)"]
    assert latency.get_xlabel() == "clients"
    lines = {line.get_label(): line for line in ttft.lines}
    assert list(lines["ttft_p99<0.5"].get_ydata()) == [0.5, 0.5]
    assert list(lines["holds"].get_xdata()) == [1, 16]
    assert list(lines["breaks"].get_xdata()) == [17, 32]
    assert list(lines["breaks"].get_ydata()) == [0.7, 2.0]


@pytest.mark.parametrize("name", ["chart", "chart.PNG", "chart.txt", "größer.1"])
@pytest.mark.usefixtures("drawn")
def test_the_file_is_a_png_whatever_its_name(name: str, tmp_path: Path) -> None:
    """A load takes minutes: its chart mustn't be lost for a name, or for a load without an answer."""
    draw_tuning(tuning(point(5, completed=0, failed=9)), tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(PNG)


@pytest.mark.parametrize("model", ["org/$\\nothing$", "größer\n2"])
def test_a_model_has_any_name(model: str, drawn: list[Any], tmp_path: Path) -> None:
    found = tuning()
    found.model = model
    draw_tuning(found, tmp_path / "chart.png")
    (figure,) = drawn
    assert figure.axes[0].get_title(loc="left") == f"{model}: 512 tokens in, 128 out"
