"""Pages in a real browser, light and dark: what is drawn, what is told, and that rows and curves find each other."""

import inspect

import pytest
import torch
from torch import nn

import torchremat
from views.browser import needs_browser, told_by

pytest.importorskip("plotly", reason="pages need plotly: pip install 'torchremat[html]'")
pytestmark = needs_browser


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def subject():
    x = torch.randn(256, 64)
    return nn.Sequential(*(Block() for _ in range(4))), lambda model: model(x).square().mean()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    model, step = subject()
    planner = torchremat.Planner(model, step, cost="flops")
    planner.plan("60% of activations").html(folder / "plan.html")
    planner.frontier(points=6).html(folder / "frontier.html")
    torchremat.measure(model, step).html(folder / "measured.html")
    torchremat.saved(model, step).html(folder / "saved.html")
    return folder


@pytest.mark.parametrize("name", ["plan", "frontier", "measured", "saved"])
def test_a_page_draws_without_a_network(pages, name):
    told = told_by(
        pages / f"{name}.html",
        """return {
          drawn: document.querySelectorAll(".figure .main-svg path").length,
          rows: document.querySelectorAll("tbody tr").length,
          asked: performance.getEntriesByType("resource").map((one) => one.name),
        };""",
    )

    assert told["drawn"] > 5
    assert told["rows"] > 1
    assert told["asked"] == []


@pytest.mark.parametrize(
    ("dark", "page", "forward"),
    [(False, "rgb(251, 251, 249)", "#9ad0f0"), (True, "rgb(21, 24, 27)", "#4e8fb5")],
    ids=["light", "dark"],
)
def test_page_and_chart_are_light_or_dark_together(pages, dark, page, forward):
    told = told_by(
        pages / "plan.html",
        """return [
          getComputedStyle(document.body).backgroundColor,
          chart.data.find((one) => one.name === "forward").fillcolor,
          JSON.stringify([chart.data, chart.layout]).includes('"@'),
        ];""",
        dark=dark,
    )

    assert told == [page, forward, False]  # no colour is left without a value


def test_a_plan_shows_plain_and_planned_budget_regions_and_peak(pages):
    names, rows, notes = told_by(
        pages / "plan.html",
        """return [
          chart.data.map((one) => one.name), chart.layout.yaxis2.categoryarray,
          chart.layout.annotations.map((one) => one.text),
        ];""",
    )

    assert [name.split(",")[0].split()[0] for name in names[:8]] == [
        "there",
        "forward",
        "recompute",
        "backward",
        "plain",
        "planned",
        "budget",
        "peak",
    ]
    assert rows == ["phase", "module", "region"]
    assert notes[0].startswith("peak ")


def test_pointing_at_a_measured_curve_tells_module_operator_and_line_and_finds_the_row(pages):
    told = told_by(
        pages / "measured.html",
        """const trace = chart.data.find((one) => one.name.startsWith("measured"));
        const at = trace.customdata.findIndex((one) => one[1] === "2.up");
        await point(trace.x[at], trace.y[at]);
        return [
          [...chart.querySelectorAll(".hovertext")].map((one) => one.textContent).join(),
          [...document.querySelectorAll("tr.marked")].map((one) => one.dataset.key),
          chart.layout.shapes.length,
        ];""",
    )

    text, marked, shapes = told
    assert "forward of 2.up" in text and "aten.addmm" in text
    assert f"test_browser.py:{inspect.getsourcelines(Block.forward)[1] + 1}" in text
    assert marked == ["2.up"]
    assert shapes == 2  # its forward and its backward


def test_a_row_marks_its_module_in_the_curve_until_it_is_left_and_holds_it_when_clicked(pages):
    told = told_by(
        pages / "measured.html",
        """const one = row("1.down"), seen = [];
        const note = () => seen.push([chart.layout.shapes.length, one.classList.contains("held")]);
        one.dispatchEvent(new MouseEvent("mouseenter")); note();
        one.dispatchEvent(new MouseEvent("mouseleave")); note();
        one.click(); one.dispatchEvent(new MouseEvent("mouseleave")); note();
        one.click(); note();
        return seen;""",
    )

    assert told == [[2, False], [0, False], [2, True], [0, False]]


def test_headings_sort_numbers_by_size_and_names_by_name(pages):
    told = told_by(
        pages / "measured.html",
        """const heads = [...document.querySelectorAll("th")], seen = [];
        const column = (place) => [...document.querySelectorAll("tbody tr")].map((one) => one.cells[place].textContent);
        const click = (place) => { heads[place].querySelector("button").click(); seen.push(column(place)); };
        click(0); click(0); click(1);
        seen.push([...document.querySelectorAll("tbody tr")].map((one) => Number(one.cells[1].dataset.order)));
        seen.push(heads.map((one) => one.getAttribute("aria-sort")));
        return seen;""",
    )

    up, down, _, sizes, sorts = told
    assert up == sorted(up) and down == sorted(up, reverse=True)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
    assert sorts[:2] == [None, "descending"]


def test_a_zoomed_curve_stays_so_while_rows_are_pointed_at_and_the_scheme_changes(pages):
    told = told_by(
        pages / "plan.html",
        """const whole = chart.layout.xaxis.range.slice();
        await Plotly.relayout(chart, { "xaxis.range": [0, whole[1] / 4] });
        document.querySelector("tbody tr").dispatchEvent(new MouseEvent("mouseenter"));
        await pause();
        return [chart.layout.xaxis.range[1] / whole[1], whole[0]];""",
    )

    assert told == [0.25, 0]


def test_a_frontier_marks_floor_and_knee_and_finds_the_row_of_a_point(pages):
    told = told_by(
        pages / "frontier.html",
        """await point(chart.data[0].x[1], chart.data[0].y[1]);
        return [
          chart.layout.annotations.map((one) => one.text.split(":")[0]),
          [...document.querySelectorAll("tr.marked")].map((one) => one.dataset.key),
        ];""",
    )

    assert told[0][0] == "floor"
    assert told[1] == ["1"]


def test_names_of_modules_are_text_and_nothing_else(tmp_path):
    model, step = subject()
    evil = "</script><script>document['title']='mine'</script><img src=x onerror=alert(1)>"
    outer = nn.Module()
    outer.add_module(evil, model)
    outer.forward = lambda: step(model)

    torchremat.measure(outer, lambda outer: outer.forward()).html(tmp_path / "evil.html")
    torchremat.saved(outer, lambda outer: outer.forward()).html(tmp_path / "saved.html")

    for name in ("evil", "saved"):
        title, images, rows = told_by(
            tmp_path / f"{name}.html",
            """return [
              document.title, document.images.length,
              [...document.querySelectorAll("tbody tr")].map((one) => one.dataset.key),
            ];""",
        )
        assert title != "mine" and images == 0
        assert any(evil in key for key in rows)
