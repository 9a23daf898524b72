import torch

from torchremat.regions.recording import Recording
from torchremat.regions.region import Region
from torchremat.regions.settings import Settings


def recorded():
    """What a region of two calls has noted: `exp` saves a tensor, and `mul` two."""
    region = Region(Settings(), "r")
    x = torch.ones(3, requires_grad=True)
    y = region.call(torch.exp, (x,), {}, [torch.exp], last=False)
    z = region.call(torch.mul, (y, x), {}, [torch.mul])
    return region, z


def test_what_two_calls_have_noted():
    recording, z = recorded()

    assert z.grad_fn is not None
    assert [call.slots for call in recording.calls] == [1, 3]
    assert [call.sources for call in recording.calls] == [[0], [(0, 0), 0]]
    assert [tuple(one[0]) for one in recording.metadata] == [(3,)] * 3
    assert [recording.call_of(index) for index in range(3)] == [0, 1, 1]
    assert (len(recording.held), recording.is_running, recording.runs_backward) == (1, False, False)


def test_a_call_that_raised_is_cut_off():
    recording, _ = recorded()
    recording.fresh.update({0, 2})

    recording.cut(1, 1)

    assert (len(recording.calls), len(recording.metadata), recording.fresh) == (1, 1, {0})


def test_names_in_messages():
    recording, _ = recorded()
    plain = Recording(None)
    plain.calls = recording.calls

    assert recording.name(1) == "region r"
    names = [f"region of {one.__qualname__}" for one in (torch.exp, torch.mul)]
    assert [plain.name(call) for call in (0, 1)] == names


def test_what_is_needed_to_run_again_is_released():
    recording, _ = recorded()

    recording.clear()

    assert (recording.calls, recording.held, len(recording.metadata)) == ([], [], 3)
