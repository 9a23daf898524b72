from types import SimpleNamespace

import pytest
import torch

from torchremat import SavedTensor, VersionError
from torchremat._compat import autograd, binding
from torchremat._compat.binding import private
from torchremat._compat.sharding import _groups_of


def test_a_name_that_torch_lacks_is_an_error_which_names_it():
    with pytest.raises(
        VersionError, match=r"has no `torch\._C\._no_such_thing`, which flying needs\. .*2\.11 to 2\.14"
    ):
        private("_C._no_such_thing", needed_for="flying")


def test_a_name_that_newer_ones_have_is_an_error_which_says_since_when(monkeypatch):
    monkeypatch.setattr(binding, "RELEASE", (2, 11))

    with pytest.raises(VersionError, match=r"which flying needs\. Torch 2\.13 has it; install that, or a newer one\.$"):
        private("_C._no_such_thing", needed_for="flying", since=(2, 13))


def test_a_torch_that_cannot_make_a_saved_tensor(monkeypatch):
    autograd._maker.cache_clear()
    monkeypatch.delattr(torch._C._autograd, "_make_saved_tensor", raising=False)

    with pytest.raises(VersionError, match="_make_saved_tensor`, which a SavedTensor needs"):
        SavedTensor(torch.ones(2))


def test_it_is_an_import_error():
    with pytest.raises(ImportError):
        private("nothing", needed_for="anything")


def test_a_name_that_is_there_is_found():
    assert private("nn.Linear", needed_for="layers") is torch.nn.Linear


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (SimpleNamespace(_fsdp_param_groups=["a", "b"]), ["a", "b"]),
        (SimpleNamespace(_fsdp_param_group="a"), ["a"]),
        (SimpleNamespace(_fsdp_param_group=None), []),
        (SimpleNamespace(), []),
        (None, []),
    ],
)
def test_groups_of_sharded_parameters_in_every_torch(state, groups):
    assert _groups_of(state) == groups
