"""Pages and tables as text: what is in them, and what is shown of things in a notebook."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import torchremat
from torchremat import UnsupportedError
from torchremat.views.charts import tree_chart
from torchremat.views.page import Chart, Fact, Page, Table, TableCell, TableRow
from torchremat.views.viewed import fragment, write_page

ROOT = Path(__file__).parents[2]
plotly = pytest.importorskip("plotly", reason="pages need plotly: pip install 'torchremat[html]'")

PAGE = Page(
    title="a < b",
    facts=(Fact(name="peak", value="1 MiB", note="</dd>"), Fact(name="said", value="a sentence " * 6)),
    charts=(Chart(title="c", figure={"data": [{"x": ["</script>"]}], "layout": {}}, spans={"k": [(0.0, 1.0)]}),),
    tables=(
        Table(
            title="t",
            columns=("name", "size"),
            rows=(TableRow(cells=(TableCell("<b>x"), TableCell("1 MiB", 2**20)), key='"k'),),
        ),
    ),
)


def things():
    x = torch.randn(512, 32)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    planner = torchremat.Planner(model, lambda model: model(x).square().mean(), cost="flops")
    return {
        "plan": planner.plan("min"),
        "frontier": planner.frontier(points=4),
        "measurement": torchremat.measure(model, lambda model: model(x).square().mean()),
        "saved": torchremat.saved(model, lambda model: model(x).square().mean()),
    }


@pytest.fixture(scope="module")
def found():
    return things()


NAMES = ["plan", "frontier", "measurement", "saved"]


class Tags(HTMLParser):
    """Counts tags, and raises where one is closed that is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    return tags


def test_what_a_page_is_told_is_text(tmp_path):
    write_page(PAGE, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()

    tags = parsed(text)
    assert tags.seen.count("b") == 1  # that of the number
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)[0]["figure"]["data"] == [{"x": ["</script>"]}]
    assert json.loads(data)[0]["spans"] == {"k": [[0.0, 1.0]]}
    assert "<b>x" in tags.text


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_one_file_that_names_no_other(found, name, tmp_path):
    found[name].html(tmp_path / "page.html")

    text = (tmp_path / "page.html").read_text()
    own = text.replace(plotly.offline.get_plotlyjs(), "")
    assert len(own) < len(text)  # the library is inside
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://""", own)
    assert "default-src 'none'" in own
    assert "{{" not in own
    parsed(own)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_table_and_repr_is_one_line(found, name):
    text = found[name]._repr_html_()

    tags = parsed(text)
    assert tags.seen.count("table") == 2 and "script" not in tags.seen
    assert "\n" not in repr(found[name]) and len(repr(found[name])) < 160
    assert repr(found[name]).startswith(f"<{type(found[name]).__name__}: ")


def test_a_plan_in_a_notebook_has_its_units_and_the_numbers_of_its_text(found):
    tags = parsed(found["plan"]._repr_html_())

    for number in ("1.", "MiB"):
        assert number in str(found["plan"])
    for unit in found["plan"].units:
        assert unit.name in tags.text
    (peak,) = (line for line in str(found["plan"]).splitlines() if line.startswith("peak"))
    assert peak == "peak       " + " ".join(tags.text[tags.text.index("peak") + 1 :][:2])


def test_the_boxes_in_a_box_fill_it():
    # Half of a block's box was empty: what its own code saves, beside the modules in it.
    chart = tree_chart({"a": 6, "a.up": 3, "a.down": 1, "": 2}, root="the model", title="t")

    (tree,) = chart.figure["data"]
    boxes = dict(zip(tree["ids"], zip(tree["labels"], tree["parents"], tree["values"], strict=True), strict=True))
    assert boxes["the model"] == ("the model", "", 12)
    assert boxes["a"] == ("a", "the model", 10)
    assert boxes["a\n"] == ("the rest", "a", 6)
    for name, (_, _, size) in boxes.items():
        inside = [part for _, parent, part in boxes.values() if parent == name]
        assert not inside or sum(inside) == size
    assert tree["customdata"][tree["ids"].index("a\n")] == ["a, the rest", "6 B", "a"]  # of the row of its module


def test_long_tables_of_a_notebook_say_what_is_left_out():
    rows = tuple(TableRow(cells=(TableCell(str(number)),)) for number in range(100))

    text = fragment(Page(title="t", facts=(), tables=(Table(title="t", columns=("n",), rows=rows),)))

    assert text.count("<tr>") == 41 and "... 60 more" in text


def test_what_is_not_known_of_a_loss_without_grad_is_said():
    report = torchremat.saved(lambda: torch.ones(2).sum())

    assert "does not require grad" in report._repr_html_()


@pytest.mark.parametrize("name", ["plan", "measurement"])
def test_plans_and_measurements_are_traces(found, name, tmp_path):
    found[name].trace(tmp_path / "step.json")

    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    own = [one for one in events if one["pid"] == max(one["pid"] for one in events)]
    peak = max(one["args"]["bytes"] for one in own if one["ph"] == "C")
    assert peak == (found["plan"].step_peak_bytes if name == "plan" else found["measurement"].peak_bytes)
    assert {one["name"] for one in own if one["ph"] == "X"} >= {"forward", "backward"}


def test_regions_and_recomputes_of_a_plan_are_slices(found):
    from torchremat.planning.results.plan_views import steps_of

    _, planned = steps_of(found["plan"])
    kinds = {one.kind for one in planned.slices if one.row == "region"}

    assert kinds == {"region", "recompute"}
    recomputed = [one for one in planned.slices if one.row == "region" and one.kind == "recompute"]
    phases = [one for one in planned.slices if one.row == "phase" and one.kind == "recompute"]
    assert sum(one.ends_s - one.starts_s for one in recomputed) == pytest.approx(
        sum(one.ends_s - one.starts_s for one in phases)
    )


def test_what_waits_in_a_store_is_a_slice():
    x = torch.randn(512, 32)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    from torchremat.planning.results.plan_views import steps_of
    from torchremat.planning.simulator.offload_choices import StoredUnit

    plan = torchremat.plan(model, lambda model: model(x).square().mean(), budget="100%", cost="flops")
    away = StoredUnit(unit=1, store=0, leaves_after=1, comes_before=2, stored_bytes=2048)
    stored = torchremat.planning.results.plans.replace(plan, stored=(away,), stores=("Disk",))

    (one,) = (one for one in steps_of(stored)[1].slices if one.kind == "store")
    assert (one.row, one.name, one.says) == ("store 0", plan.units[1].name, ("2.00 KiB in Disk",))
    assert one.starts_s < one.ends_s


def test_without_plotly_the_error_names_the_extra(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)

    with pytest.raises(UnsupportedError, match=r"pip install 'torchremat\[html\]'"):
        found["plan"].html(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
