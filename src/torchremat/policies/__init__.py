"""Policies: which operators' outputs a region keeps instead of computing them again.

from torchremat import checkpointed, Disk, name, wrap
from torchremat.policies import save_matmuls, save_only_these_names, save_operators

wrap(model, "layers.*", policy=save_matmuls)
wrap(model, "layers.*", policy=save_only_these_names("qkv") | save_operators("aten.mm").into(Disk()))

A policy is a frozen value, called with a context, an operator and its arguments. `p | q` keeps outputs that either
keeps, with the answer of the first that keeps them; `p & q` keeps outputs that both keep, with the answer of the first;
`~p` keeps outputs that `p` does not; `p.into(store)` puts the outputs that `p` keeps into a store.

policy.py    the base class, and how policies combine
built_in.py  by operator, by the names that `torchremat.name` gives, by module, by the size of the output
ordinals.py  by the number of the operator, for plans
"""

from torchremat.policies.built_in import (
    everything_saved,
    nothing_saved,
    offload_these_names,
    save_any_names_but_these,
    save_attention,
    save_convolutions,
    save_in_modules,
    save_larger_than,
    save_matmuls,
    save_only_these_names,
    save_operators,
    save_smaller_than,
    save_unbatched_matmuls,
)
from torchremat.policies.policy import Policy

__all__ = [
    "Policy",
    "everything_saved",
    "nothing_saved",
    "offload_these_names",
    "save_any_names_but_these",
    "save_attention",
    "save_convolutions",
    "save_in_modules",
    "save_larger_than",
    "save_matmuls",
    "save_only_these_names",
    "save_operators",
    "save_smaller_than",
    "save_unbatched_matmuls",
]
