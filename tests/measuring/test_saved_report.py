"""A report of saved tensors as totals, text and data."""

import json

import pytest
import torch
from torch import nn

import torchremat
from torchremat import saved

ROWS, WIDTH = 4, 8
TENSOR = ROWS * WIDTH * 4


@pytest.fixture
def report():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
    x = torch.randn(ROWS, WIDTH)
    return saved(model, lambda model: model(x).double().sin().sum())


def test_totals_agree(report):
    # Three results of relu, the first two saved by the next linear as well, and the last in float64 by `sin`.
    assert report.saved_bytes == 3 * TENSOR + 2 * TENSOR
    assert report.bytes_by_save == 5 * TENSOR + 2 * TENSOR
    assert report.by_operator() == {"ReluBackward0": 3 * TENSOR, "SinBackward0": 2 * TENSOR, "AddmmBackward0": 0}
    assert report.by_module() == {"": 2 * TENSOR, "0.1": TENSOR, "1.1": TENSOR, "2.1": TENSOR, "1.0": 0, "2.0": 0}
    assert report.by_dtype() == {"float32": 3 * TENSOR, "float64": 2 * TENSOR}
    assert report.by_need() == {"mask": TENSOR}
    (line,) = report.by_line()  # this file's alone, not those of torch that are called on the way
    assert line.startswith("tests/measuring/test_saved_report.py:21 in ")
    for totals in (report.by_operator(), report.by_module(), report.by_line(), report.by_dtype()):
        assert sum(totals.values()) == report.saved_bytes


def test_storages_and_entries_name_each_other(report):
    for number, storage in report.storages.items():
        assert storage.number == number
        assert all(number in report.entries[save].storages for save in storage.saves)
        assert [save for save in storage.saves if report.entries[save].is_first] == [storage.saves[0]]
    for index, entry in enumerate(report.entries):
        assert index not in entry.others
        assert all(index in report.entries[other].others for other in entry.others)


def test_the_text_says_what_is_kept_and_what_would_free_it(report):
    lines = str(report).splitlines()

    assert lines[0].split() == ["saved", "640", "B", "in", "4", "storages,", "by", "6", "saves"]
    assert lines[1].split()[:5] == ["each", "save", "alone", "896", "B"]
    assert "copies                   256 B  1 storage made by copying another" in lines
    assert "bits                     128 B  one bit for each element would do" in lines
    words = [line.split() for line in lines]
    assert any(one[:4] == ["256", "B", "SinBackward0.self", "aten.sin.default"] for one in words)
    assert ["256", "B", "40%", "SinBackward0"] in words
    assert any(one[:3] == ["640", "B", "100%"] and one[-1] == "report.<locals>.<lambda>" for one in words)
    copy = ["256", "B", "SinBackward0.self", "ReluBackward0.result", "aten._to_copy.default"]
    assert any(one[:5] == copy for one in words)


def test_the_text_has_as_many_rows_as_asked_for(report):
    assert "... 3 more" in report.text(top=1)
    assert "more" not in report.text(top=100)
    assert str(report) == report.text(top=10)


def test_the_report_as_data_is_json(report, tmp_path):
    report.save(tmp_path / "saved.json")

    found = json.loads((tmp_path / "saved.json").read_text())
    assert found == report.as_dict()
    assert found["saved_bytes"] == 5 * TENSOR
    assert [one["operator"] for one in found["entries"]] == [one.operator for one in report.entries]
    assert found["copies"] == [
        {
            "storage": report.copies[0].storage,
            "source": report.copies[0].source,
            "source_kind": "saved",
            "operator": "aten._to_copy.default",
            "where": report.copies[0].where,
            "freed_bytes": 2 * TENSOR,
        }
    ]
    assert [one["name"] for one in found["blocks"]] == list(report.blocks)


def test_a_report_of_what_is_not_there_is_data_too():
    found = saved(lambda: torch.ones(2).sum()).as_dict()

    assert json.loads(json.dumps(found))["requires_grad"] is False
    assert found["saved_bytes"] == 0


def test_a_loss_that_saves_nothing_has_a_text():
    x = torch.randn(3, requires_grad=True)

    report = saved(lambda: x.sum())

    assert str(report).split() == ["saved", "0", "B", "in", "0", "storages,", "by", "0", "saves"]


def test_compiled_code_is_said_to_be(report):
    assert "Compiled" not in str(report)


def test_names_are_public():
    assert {"Freed", "Saved", "SavedReport", "saved"} <= set(torchremat.__all__)
