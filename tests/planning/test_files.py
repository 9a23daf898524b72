"""Plans as JSON: what is written comes back equal, and everything else is an error that names the place."""

import json
from dataclasses import replace
from functools import cache

import pytest

from planning.kinds import KINDS
from probes.planning import HeldOperators, KeepNode, RegionNode, StoredUnit
from torchremat import Plan, PlanError, plan


@cache
def made():
    model, step = KINDS["loop"]()
    tree = (KeepNode(0), RegionNode((KeepNode(1), RegionNode((KeepNode(2),)))), RegionNode((KeepNode(3),)))
    return replace(plan(model, step, budget="100%"), tree=tree)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "plan.json"
    made().save(found)
    return found


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_a_plan_comes_back_equal(path):
    found = Plan.load(path)

    assert found == made()
    assert str(found) == str(made())
    found.save(path.with_name("again.json"))
    assert path.with_name("again.json").read_text() == path.read_text()


def test_a_loaded_plan_is_applied_as_the_first(path):
    model, _ = KINDS["loop"]()

    Plan.load(str(path)).apply(model)

    assert sorted(name for name, one in model.named_modules() if "forward" in one.__dict__) == [
        "",
        "layers.1",
        "layers.2",
        "layers.3",
    ]


def test_every_kind_of_plan_comes_back_equal(tmp_path):
    for name in ("one linear", "siamese", "shared weights", "sequential in place"):
        model, step = KINDS[name]()
        one = plan(model, step, budget="100%")
        one.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == one


def test_the_file_is_readable(path):
    lines = path.read_text().splitlines()

    assert lines[:3] == ["{", ' "schema": "torchremat.plan",', ' "version": 1,']
    assert ' "tree": [0, [1, [2]], [3]],' in lines
    assert max(map(len, lines)) <= 120


def test_other_options_of_a_kept_unit_are_written_out(path):
    tree = (KeepNode(0, 2), RegionNode((KeepNode(1), KeepNode(2))), KeepNode(3))
    held = (HeldOperators(units=(0,), operators=("aten.mm.default", "aten.relu.default"), held=(1,)),)
    one = replace(made(), tree=tree, held=held)

    one.save(path)

    assert '"tree": [{"keep": 0, "option": 2}, [1, 2], 3]' in path.read_text()
    assert Plan.load(path) == one


@pytest.mark.parametrize(
    ("tree", "held", "said"),
    [
        (
            (KeepNode(0, 1), KeepNode(1), KeepNode(2), KeepNode(3)),
            (),
            r"keeps the units \[0\] in part, and `held` is for .* \[\]",
        ),
        (
            (RegionNode((KeepNode(0, 1),)), KeepNode(1), KeepNode(2), KeepNode(3)),
            ((0,), (0,)),
            r"units \[0\] in part inside of regions",
        ),
        (
            (KeepNode(0, 1), KeepNode(1), KeepNode(2), KeepNode(3)),
            ((0,), (0, 1)),
            r"numbers of operators that do not exist: \(0, 1\)",
        ),
    ],
)
def test_what_is_held_belongs_to_the_tree(path, tree, held, said):
    held = (HeldOperators(units=held[0], operators=("aten.mm.default",), held=held[1]),) if held else ()

    replace(made(), tree=tree, held=held).save(path)

    with pytest.raises(PlanError, match=said):
        Plan.load(path)


@pytest.mark.parametrize(
    ("astray", "stores"), [({"unit": 4}, 1), ({"leaves_after": 4}, 1), ({"comes_before": 9}, 1), ({}, 0)]
)
def test_what_is_stored_belongs_to_the_plan(path, astray, stores):
    # Printing or applying it ended in an IndexError from within.
    stored = replace(StoredUnit(unit=1, store=0, leaves_after=1, comes_before=2, stored_bytes=8), **astray)

    replace(made(), stored=(stored,), stores=("Disk('.')",) * stores).save(path)

    with pytest.raises(PlanError, match="`stored` names stores or units that do not exist"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a plan, it is not JSON"),
        ("{", "not a plan, it is not JSON"),
        ("\0\0", "not a plan, it is not JSON"),
        ("[]", '"schema" is not "torchremat.plan"'),
        ("3", '"schema" is not "torchremat.plan"'),
        ("null", '"schema" is not "torchremat.plan"'),
        ("{}", '"schema" is not "torchremat.plan"'),
        ('{"schema": "other", "version": 1}', '"schema" is not "torchremat.plan"'),
        ('{"schema": ["torchremat.plan"]}', '"schema" is not "torchremat.plan"'),
        ('{"schema": "torchremat.plan"}', '"version" is None, expected a number from 1 to 1'),
        ('{"schema": "torchremat.plan", "version": "1"}', "\"version\" is '1'"),
        ('{"schema": "torchremat.plan", "version": 0}', '"version" is 0'),
        ('{"schema": "torchremat.plan", "version": true}', '"version" is True'),
        ('{"schema": "torchremat.plan", "version": 1.5}', '"version" is 1.5'),
        (
            '{"schema": "torchremat.plan", "version": 7}',
            "the plan has version 7, this torchremat reads up to 1. Install a newer torchremat, or plan again",
        ),
        ('{"schema": "torchremat.plan", "version": 1}', "budget_bytes is missing; .*plain_curve is missing"),
        ("[" * 100_000, "not a plan, it is nested too deeply"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_what_is_no_plan(tmp_path, text, said):
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(PlanError, match=said) as error:
        Plan.load(path)

    assert str(path) in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00\x80")

    with pytest.raises(PlanError, match="cannot be read as a plan"):
        Plan.load(path)


@pytest.mark.parametrize("name", ["absent.json", ".", "nul\0"])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(PlanError, match="cannot be read as a plan"):
        Plan.load(tmp_path / name)


def test_every_cut_of_a_file_is_an_error(path):
    text = path.read_text()

    for end in range(0, len(text) - 2, 197):
        path.write_text(text[:end])
        with pytest.raises(PlanError):
            Plan.load(path)


def _set(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("tree"), r"plan.json.tree is missing"),
        (lambda c: c.update(more=1), r"plan.json.more is unknown"),
        (lambda c: c["units"][2].pop("flops"), r"plan.json.units\[2\].flops is missing"),
        (lambda c: c["units"][2].update(x=1, y=2), r"units\[2\].x is unknown; .*units\[2\].y is unknown"),
        (_set("budget_bytes", value="6GiB"), r"budget_bytes is '6GiB', expected int"),
        (_set("budget_bytes", value=1.5), r"budget_bytes is 1.5, expected int"),
        (_set("budget_bytes", value=True), r"budget_bytes is True, expected int"),
        (_set("budget_bytes", value=-1), r"budget_bytes is -1, which is negative"),
        (_set("plain_seconds", value=float("nan")), r"plain_seconds is nan, expected float"),
        (_set("plain_seconds", value=float("inf")), r"plain_seconds is inf, expected float"),
        (_set("plain_seconds", value=None), r"plain_seconds is None, expected float"),
        (_set("plain_seconds", value=10**400), r"plain_seconds is 2\*\*1328 or more, too large for a plan"),
        (_set("peak_bytes", value=10**400), r"peak_bytes is 2\*\*1328 or more"),
        (_set("calls", "roots", value=[]), r"`calls` has no roots, and without one nothing is recomputed"),
        (_set("cost", value="money"), r"cost is 'money', expected one of 'seconds', 'flops'"),
        (_set("plain_source", value=1), r"plain_source is 1, expected one of 'measured', 'predicted'"),
        (_set("units", value={}), r"units is \{\}, expected a list"),
        (_set("units", 0, value=[]), r"units\[0\] is \[\], expected an object"),
        (_set("parameters", value=[]), r"parameters is \[\], expected an object"),
        (_set("parameters", value={"a": 3}), r"parameters.a is 3, expected a list"),
        (_set("parameters", value={"a": [3, None]}), r"parameters.a\[1\] is None, expected int"),
        (_set("inputs", value={"elements": {"": "x"}}), r"inputs.elements. is 'x', expected int"),
        (_set("calls", "roots", value=[1]), r"calls.roots\[0\] is 1, expected str"),
        (_set("tree", value=3), r"tree is 3, expected a list"),
        (_set("tree", value=[0, [], 1]), r"tree\[1\].*without children"),
        (_set("tree", value=[0, "1"]), r"tree\[1\] is '1', expected int"),
        (_set("tree", value=[0, True]), r"tree\[1\] is True, expected int"),
        (_set("tree", value=[0, {"keep": 1}]), r"tree\[1\] is .*, expected int"),
        (_set("tree", value=[0, 1, 2]), r"the tree covers the units \[0, 1, 2\], the plan has 4"),
        (_set("tree", value=[3, 2, 1, 0]), r"the tree covers the units \[3, 2, 1, 0\], the plan has 4"),
        (_set("tree", value=[0, 1, 2, 3, 3]), r"the tree covers the units \[0, 1, 2, 3, 3\]"),
        (_set("tree", value=[]), r"the tree covers the units \[\], the plan has 4"),
        (lambda c: c["calls"]["units"].pop(), r"the plan has 4, with calls for 3"),
        (_set("units", value=[]), r"the plan has 0, with calls for 4"),
    ],
)
def test_damaged_fields_are_named(path, change, said):
    with pytest.raises(PlanError, match=said):
        Plan.load(changed(path, change))


@pytest.mark.parametrize("kind", ["others", "opened"])
def test_calls_that_are_no_units_are_of_modules_of_the_model(path, kind):
    # They were not looked at: an AttributeError of torch, from the middle of `apply`.
    call = {"name": "absent", "number": 0, "inside": ["0"]}
    plan = Plan.load(changed(path, _set("calls", kind, value=[call])))
    model, _ = KINDS["loop"]()

    with pytest.raises(PlanError, match="there is no module `absent`"):
        plan.apply(model)


def test_a_unit_without_calls_is_an_error(path):
    with pytest.raises(PlanError):
        Plan.load(changed(path, _set("calls", "units", 1, value=[])))


def test_a_whole_number_is_a_float_as_well(path):
    assert Plan.load(changed(path, _set("plain_seconds", value=2))).plain_seconds == 2.0


def test_a_file_without_a_plain_peak_can_be_printed(path):
    assert "predicted, " in str(Plan.load(changed(path, _set("plain_peak_bytes", value=0))))


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_a_tree_that_nests_without_end_is_an_error(path, depth):
    text = path.read_text().replace('"tree": [0, [1, [2]], [3]]', '"tree": ' + "[" * depth + "0" + "]" * depth)
    path.write_text(text)

    with pytest.raises(PlanError):
        Plan.load(path)


def test_a_deep_plan_comes_back(path):
    tree = KeepNode(3)
    for _ in range(150):
        tree = RegionNode((tree,))
    deep = replace(made(), tree=(KeepNode(0), KeepNode(1), KeepNode(2), tree))

    deep.save(path)

    assert Plan.load(path) == deep


def test_nothing_is_executed(path, tmp_path):
    mark = tmp_path / "ran"
    text = path.read_text().replace("layers.1", f"__import__('os').mkdir('{mark}')")
    path.write_text(text)

    Plan.load(path)

    assert not mark.exists()
