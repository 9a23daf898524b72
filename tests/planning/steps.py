"""What the tests of planning share: random trees, steps under a tree, and a fingerprint of all that is the user's."""

import random
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import torch

from probes.memory import observe_allocations, observe_storages, subject_of, unobserved
from probes.planning import (
    Bandwidth,
    Here,
    KeepNode,
    OffloadChoice,
    RegionNode,
    Speed,
    StoredUnit,
    calls_of,
    cut_options,
    divisible,
    fitted,
    held_of,
    installed,
    kept,
    mix,
    profile_subject,
    step_seconds,
    store_sizes,
    with_parts,
)
from probes.regions import Settings

CPU = torch.device("cpu")


def profile(model, step, *, optimizer=None, device=None):
    """The profile of a step, on this machine."""
    subject = subject_of(step, model, optimizer, needs_model=True)
    return profile_subject(model, subject, Here(subject.device(device)))


# ----------------------------------------------------------------------------------------------- trees


def random_tree(units, rng, *, depth=3):
    """A random nested tree over the units, without regions across calls of a root."""

    def nodes(first, last, levels):
        result, place = [], first
        while place <= last:
            kind = rng.random()
            if levels and kind < 0.6:
                end = min(last, place + rng.randint(0, max(0, (last - first + 1) // 2)))
                result.append(RegionNode(tuple(nodes(place, end, levels - 1))))
                place = end + 1
            else:
                result.append(KeepNode(place))
                place += 1
        return result

    return fitted(units, tuple(nodes(0, len(units.units) - 1, depth)))


def with_cuts(own):
    """The profile in which units may be recomputed in parts."""
    return replace(own, options=cut_options([own])[0])


def in_parts(own, tree, rng):
    """The tree with some of the units that it recomputes in parts."""
    inside = [keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,))]
    counts = {unit: len(own.options[unit]) for unit in inside if own.options[unit] and rng.random() < 0.7}
    return fitted(own.units, with_parts(tree, {unit: rng.randint(1, count) for unit, count in counts.items()}))


def random_loads(profile, store_profile, tree, rng):
    """Some of the kept units at top level, each with a random moment to leave and to come back."""
    kept = [node.stage for node in tree if isinstance(node, KeepNode)]
    order, last = profile.order, len(profile.sizes) - 1
    offload_sizes = {unit: store_profile.offload_sizes.get(one.calls) for unit, one in enumerate(profile.units.units)}
    offloads = {}
    for unit in kept:
        if offload_sizes[unit] and unit in order and rng.random() < 0.7:
            place = order.index(unit)
            planned = StoredUnit(
                unit=unit,
                store=0,
                leaves_after=rng.randint(unit, min(last, unit + 3)),
                comes_before=order[rng.randint(max(0, place - 3), place)],
                stored_bytes=offload_sizes[unit].all_bytes,
            )
            offloads[unit] = OffloadChoice(planned=planned, offload_size=offload_sizes[unit])
    return {unit: offloads[unit] for unit in order if unit in offloads}


# A store that takes about as long for a block's tensors as the golden plans' device of no name for computing them.
DECLARED = Bandwidth(tensor_s=1e-5, byte_s=1e-10, busy_tensor_s=2e-6, busy_byte_s=2e-11)


@contextmanager
def with_declared_speed():
    """A block in which all stores have that speed. To measure one takes a second, which `test_store_speeds` spends."""
    speed = Speed(out=DECLARED, back=DECLARED, spread=0.0, measured_bytes=0)

    def declared(*_):  # a Mock would keep the stores that it was called with
        return speed

    with (
        mock.patch.object(store_sizes, "measured_speed", declared),
        mock.patch.object(step_seconds, "measured_speed", declared),
    ):
        yield


def keep_all(count):
    return tuple(KeepNode(unit) for unit in range(count))


def each(count):
    return tuple(RegionNode((KeepNode(unit),)) for unit in range(count))


def text(tree):
    """A tree as one string: `0 (1 (2) 3)` keeps unit 0, and has a region with another inside."""
    return " ".join(str(node.stage) if isinstance(node, KeepNode) else f"({text(node.children)})" for node in tree)


# ----------------------------------------------------------------------------------------------- steps


def outcome(model, step, *, seed=7):
    """Loss, gradients and buffers of one step, by name; model and generator are as before afterwards."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    grads = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    generator = torch.get_rng_state()
    torch.manual_seed(seed)
    result = step(model)
    loss = result if isinstance(result, torch.Tensor) else result["loss"] if isinstance(result, dict) else result.loss
    loss.backward()
    found = {"loss": loss.detach().clone()}
    found |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    torch.set_rng_state(generator)
    return found


def differences(found, expected):
    """Names of what is not equal bit for bit."""
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


def known_subject(step, model):
    """A step to measure, of which it is known what it writes."""
    subject = subject_of(step, model, None)
    subject.train(unobserved(), looks=True)
    return subject


class Measured:
    """A step that is measured several times, under one tree after the other: what it writes is learned once."""

    def __init__(self, model, step):
        self.subject = known_subject(step, model)

    def recomputed_flops(self):
        """Flops that recomputes of the model as it is run."""
        return self.subject.train(observe_storages(self.subject, CPU)).recomputed_flops

    def peak(self):
        """The allocator's peak of the step, relative to its start."""
        return self.subject.train(observe_allocations(self.subject, CPU)).peak_bytes


def recomputed_flops(model, step):
    return Measured(model, step).recomputed_flops()


def traced_peak(model, step):
    return Measured(model, step).peak()


def blocks(model, step):
    """The profile in which every unit is one piece."""
    return profile(model, step).blocks


def mixtures(model, step, rng, count):
    """The coarse profile, and some in which units are split into the calls inside of them, at random."""
    pair = profile(model, step)
    whole = sorted(divisible(pair))
    chosen = [frozenset(), frozenset(whole)] + [
        frozenset(call for call in whole if rng.random() < 0.5) for _ in range(count)
    ]
    return [mix(pair, split) for split in dict.fromkeys(chosen)]


def under(model, profile, tree):
    """A block in which the tree is on the model."""
    return installed(model, calls_of(profile.units), tree, Settings(), held_of(profile, tree))


# ----------------------------------------------------------------------------------------- fingerprint


def _value(value):
    if isinstance(value, torch.Tensor):
        return (id(value), value._version, value.detach().clone())
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return (id(value), value) if isinstance(value, (int, float, str, bool, type(None))) else id(value)


@dataclass(eq=False)
class Fingerprint:
    """All that belongs to the user: objects by identity, tensors with versions and values, generators."""

    parts: dict = field(default_factory=dict)

    def changes(self, now):
        """What is different, in words."""
        return [name for name in sorted(self.parts.keys() | now.parts.keys()) if self._differs(name, now)]

    def _differs(self, name, now):
        missing = object()
        return not _same(self.parts.get(name, missing), now.parts.get(name, missing))


def _same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def fingerprint(model, *, optimizer=None, extra=()):
    """All of a model that planning could touch, and the generators of torch, Python and NumPy."""
    parts = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            parts[f"{name}.{key}"] = _value(value)
        parts[f"{name} keys"] = tuple(sorted(module.__dict__))
        parts[f"{name} class"] = id(type(module))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts[f"{name} value"] = _value(parameter)
        parts[f"{name}.grad"] = _value(parameter.grad)
        parts[f"{name} backward hooks"] = _value(parameter._backward_hooks)
    for place, tensor in enumerate(extra):
        parts[f"extra {place}"] = (_value(tensor), _value(tensor.grad))
    if optimizer is not None:
        parts["optimizer"] = tuple(optimizer.__dict__)
        for place, (key, state) in enumerate(optimizer.state.items()):
            parts[f"optimizer.state {place}"] = (id(key), id(state), _value(state))
        for place, group in enumerate(optimizer.param_groups):
            parts[f"optimizer.param_groups {place}"] = {
                key: [id(one) for one in value] if key == "params" else _value(value) for key, value in group.items()
            }
    parts["torch generator"] = torch.get_rng_state()
    parts["python generator"] = random.getstate()
    kind, keys, *rest = np.random.get_state()
    parts["numpy generator"] = (kind, keys.tobytes(), *rest)
    parts["grad mode"] = torch.is_grad_enabled()
    hooks = torch.nn.modules.module
    parts["global hooks"] = tuple(
        tuple(map(id, table.values()))
        for table in (hooks._global_forward_hooks, hooks._global_forward_pre_hooks, hooks._global_backward_hooks)
    )
    return Fingerprint(parts)
