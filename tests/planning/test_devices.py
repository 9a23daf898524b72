"""Descriptions of devices: what a file may hold, and what a step takes by them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import torchremat
from torchremat import Device, DeviceError
from torchremat.planning.devices.device import MeasuredKernel, device_of
from torchremat.planning.devices.kernels import Kernels, signature
from torchremat.planning.devices.overheads import Overheads

FIELDS = {
    "name": "small",
    "type": "cuda",
    "memory_bytes": 1 << 30,
    "flops": {"float32": 1e12, "bfloat16": 4e12},
    "bandwidth": 1e11,
    "latency_s": 1e-6,
}


def written(path, **changes):
    content = {**FIELDS, **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_a_device_is_the_same_after_a_round_trip(tmp_path):
    kernels = {
        "aten.mm.default(float32[2,2], float32[2,2])": MeasuredKernel(
            seconds=1e-6, workspace_bytes=64, storage_bytes=(16,)
        )
    }
    overheads = Overheads(region_s=1e-4, saved_s=1e-6, chosen_s=3e-6, collected_s=1e-5, replayed_s=2e-5)
    device = Device(**FIELDS, efficiency=0.5, overheads=overheads, kernels=kernels)

    device.save(tmp_path / "device.json")

    assert Device.load(tmp_path / "device.json") == device


def test_a_description_by_hand_needs_no_more_than_its_fields(tmp_path):
    found = device_of(str(written(tmp_path / "device.json")))

    assert (found.name, found.block_bytes, dict(found.kernels)) == ("small", 512, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": None, "latency_s": None}, "misses flops, latency_s"),
        ({"clock": 5}, "has clock, which no device has"),
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5, expected an int"),
        ({"bandwidth": 0}, "bandwidth is 0, expected a number above 0"),
        ({"bandwidth": "fast"}, "bandwidth is 'fast', expected a number above 0"),
        ({"flops": {}}, "at least one dtype"),
        ({"flops": [1]}, r"flops is \[1\], expected at least one dtype"),
        ({"type": "tpu"}, "type is 'tpu', expected 'cpu' or 'cuda'"),
        ({"kernels": {"mm": [1]}}, r"kernels\['mm'\] is \[1\], expected a MeasuredKernel: seconds, and bytes"),
        (
            {"overheads": {"region_s": 1}},
            "expected Overheads in seconds of at least 0: region_s, saved_s, chosen_s, collected_s, replayed_s",
        ),
        (
            {"overheads": {"region_s": 1, "collected_s": -1, "replayed_s": 0}},
            "expected Overheads in seconds of at least 0: region_s, ",
        ),
        ({"kernels": {"mm": [1, 2.5]}}, r"kernels\['mm'\] is .*expected seconds and bytes of at least 0"),
        ({"kernels": []}, r"kernels is \[\], expected a dict of MeasuredKernel by signature"),
        ({"name": ["small"]}, r"name is \['small'\], expected a str"),
        ({"version": 9}, "this torchremat reads"),
    ],
)
def test_what_is_wrong_with_a_description_is_said(tmp_path, changes, message):
    path = written(tmp_path / "device.json", **changes)

    with pytest.raises(DeviceError, match=message):
        Device.load(path)


def test_what_is_no_file_of_a_device_is_said(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("h100")
    (tmp_path / "deep.json").write_text("[" * 100_000)

    for name in ("text", "absent", "deep"):
        with pytest.raises(DeviceError, match="cannot be read"):
            Device.load(tmp_path / f"{name}.json")
    with pytest.raises(DeviceError, match="not a list"):
        Device.load(tmp_path / "list.json")


def test_names_that_are_not_known_are_answered_with_those_that_are():
    with pytest.raises(DeviceError, match=r"device='h10' is not a known device\. Did you mean 'h100'\?.*a100"):
        device_of("h10")
    with pytest.raises(DeviceError, match="is not a known device"):
        device_of("h" * 5000)  # no file has such a name: an OSError of the system
    with pytest.raises(DeviceError, match="plans for another device: pass"):
        device_of(None)
    with pytest.raises(DeviceError, match="needs on='meta'"):
        torchremat.Planner(nn.Linear(2, 2), lambda model: model(torch.ones(2)).sum(), device=device_of("h100"))


@pytest.mark.parametrize("device", ["h100", "H200", "device.json", Path("device.json")], ids=str)
@pytest.mark.parametrize("call", [torchremat.plan, torchremat.fit])
def test_a_description_without_on_meta_is_told_what_it_needs(call, device):
    # It was "no device, like cpu".
    with pytest.raises(DeviceError, match=r"describes a device.* needs on='meta'"):
        call(nn.Linear(2, 2), lambda model: model(torch.ones(2)).sum(), budget="1GB", device=device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5, expected an int"),
        ({"block_bytes": 0.5}, "block_bytes is 0.5, expected an int"),
        ({"overheads": None}, "overheads is None, expected Overheads in seconds of at least 0"),
        (
            {"overheads": Overheads(region_s=-1, collected_s=0, replayed_s=0)},
            "expected Overheads in seconds of at least 0",
        ),
        ({"kernels": None}, "kernels is None, expected a dict of MeasuredKernel by signature"),
        ({"kernels": {"a": 3}}, r"kernels\['a'\] is 3, expected a MeasuredKernel: seconds, and bytes"),
        (
            {"kernels": {"a": MeasuredKernel(seconds=-1.0, workspace_bytes=0, storage_bytes=())}},
            r"kernels\['a'\] is .*expected seconds and bytes of at least 0",
        ),
        ({"bandwidth": 0, "name": 3}, "bandwidth is 0, expected a number above 0; name is 3, expected a str"),
    ],
)
def test_what_no_file_may_say_no_argument_may_say(changes, message):
    # These were saved, and refused when they were loaded.
    with pytest.raises(DeviceError, match=message):
        Device(**{**FIELDS, **changes})


def test_files_with_the_bandwidth_to_the_host_are_read(tmp_path):
    path = written(tmp_path / "device.json", host_bandwidth=1e10)

    assert Device.load(path) == Device(**FIELDS)


@pytest.mark.parametrize("name", ["v100", "a100", "a10", "l4", "h100", "h200"])
def test_the_table_is_consistent(name):
    found = device_of(name)

    assert found.name == name
    assert max(found.flops.values()) / min(found.flops.values()) < 50


def ran(func, *args):
    result = func(*args)
    return Kernels(Device(**FIELDS, efficiency=1.0)).kernel(func, args, {}, result, [result])


def test_seconds_are_those_of_a_roofline():
    # 2 * 512^3 flops at 1e12 are 268 us; 3 * 512^2 * 4 bytes at 1e11 are 31 us; the smallest kernel takes 1 us.
    x = torch.zeros(512, 512)

    assert ran(torch.ops.aten.mm.default, x, x).seconds == pytest.approx(2 * 512**3 / 1e12 + 1e-6)
    assert ran(torch.ops.aten.add.Tensor, x, x.clone()).seconds == pytest.approx(3 * 512**2 * 4 / 1e11 + 1e-6)
    assert ran(torch.ops.aten.mm.default, x.bfloat16(), x.bfloat16()).seconds == pytest.approx(2 * 512**3 / 4e12 + 1e-6)


def test_a_view_takes_nothing():
    x = torch.zeros(4, 4)

    assert Kernels(Device(**FIELDS)).kernel(torch.ops.aten.t.default, (x,), {}, x.t(), []).seconds == 0


def test_calls_that_take_the_same_have_one_signature():
    mm, a, b = torch.ops.aten.mm.default, torch.zeros(2, 3), torch.zeros(3, 4)

    assert (
        signature(mm, (a, b), {}) == signature(mm, (a + 1, b + 1), {}) == "aten.mm.default(float32[2,3], float32[3,4])"
    )
    assert signature(mm, (b.t(), a.t()), {}) == "aten.mm.default(float32~[4,3], float32~[3,2])"
    dropout = torch.ops.aten.native_dropout.default
    assert signature(dropout, (a, 0.1, True), {}) == signature(dropout, (a, 0.2, True), {})


def test_attention_keeps_float32_gradients_on_cuda():
    # FlashAttention 2: dQ of 2 x 4 heads x 128 (from 100) x 32 (from 16) and row sums, in float32; dK and dV of 2 x 4
    # heads, since only 2 heads of keys are there.
    q, k = torch.zeros(2, 4, 100, 16), torch.zeros(2, 2, 100, 16)
    func = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    found = Kernels(Device(**FIELDS))._workspace(func, (q, q, k, k))

    assert found == 4 * 2 * 4 * 128 * 32 + 4 * 2 * 4 * 128 + 2 * 2 * 4 * 100 * 16 * 4
