"""The chart of the loads that were measured."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.tuning.plots import PlotError, check_plot, draw_tuning
from serve_app.tuning.tune_report import Tuning
from tests.serve_app.tuning.load_results import GOALS, step, tuning

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
    with pytest.raises(PlotError, match=r"matplotlib is not installed; saturate\[plot\]"):
        check_plot()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_chart_is_drawn(tmp_path: Path) -> None:
    found = tuning()
    found.single = (step(30.0, failed=True),)
    draw_tuning(found, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_each_goal_has_a_panel_with_its_figures_and_its_bound(drawn: list[Any], tmp_path: Path) -> None:
    found = tuning()
    # Seconds of failed requests are infinite.
    found.single = (step(30.0, failed=True),)
    draw_tuning(found, tmp_path / "chart.png")
    (figure,) = drawn
    ttft, latency = figure.axes
    assert [ttft.get_ylabel(), latency.get_ylabel()] == ["ttft_p99 (s)", "latency_p95 (s)"]
    lines = {line.get_label(): line for line in ttft.lines}
    bound = lines["ttft_p99<0.5"]
    assert list(bound.get_ydata()) == [0.5, 0.5]
    rates = lines["at random times"]
    assert list(rates.get_xdata()) == pytest.approx([20.0, 21.0])
    assert list(rates.get_ydata()) == pytest.approx([0.2, 0.7])
    # The lone client is a load too.
    clients = lines["from clients"]
    assert list(clients.get_xdata()) == pytest.approx([1.0])
    points = [line for line in ttft.lines if line.get_color() == rates.get_color()]
    markers = {line.get_marker(): list(line.get_xdata()) for line in points}
    assert markers["o"] == pytest.approx([20.0])
    assert markers["x"] == pytest.approx([21.0])


@pytest.mark.usefixtures("drawn")
def test_a_result_without_a_figure_has_an_empty_chart(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    draw_tuning(Tuning("m", "512 tokens in, 128 out", GOALS, single=(step(5.0, failed=True),)), path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["chart", "chart.PNG", "chart.txt", "größer.1"])
@pytest.mark.usefixtures("drawn")
def test_the_file_is_a_png_whatever_its_name(name: str, tmp_path: Path) -> None:
    """A load takes minutes: its chart mustn't be lost for a name."""
    draw_tuning(tuning(), tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(PNG)


@pytest.mark.parametrize("model", ["org/$\\nothing$", "größer\n2"])
def test_a_model_has_any_name(model: str, drawn: list[Any], tmp_path: Path) -> None:
    found = tuning()
    found.model = model
    draw_tuning(found, tmp_path / "chart.png")
    (figure,) = drawn
    assert figure.axes[0].get_title(loc="left") == f"{model}: 512 tokens in, 128 out"


@pytest.mark.usefixtures("drawn")
def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "chart.png"
    with pytest.raises(FileNotFoundError) as told:
        draw_tuning(tuning(), path)
    assert told.value.filename == str(path)
