"""Tensors that a call reaches: their attributes, and the properties to watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from torchremat.state.containers import Dict
from torchremat.state.following.code import follow_class
from torchremat.state.world import World
from torchremat.tensors.parts import attributes_of, is_wrapper

_PARAMETER = frozenset({nn.Parameter})
_attributes_of = cast("Callable[[Tensor], Dict]", attrgetter("__dict__"))


def follow_parameters(world: World, parameters: list[Tensor]) -> None:
    """Follow the parameters of a module."""
    if _PARAMETER.issuperset(map(type, parameters)) and not world.is_named:
        # By far the most tensors. A tensor met twice is watched twice.
        world.tensors += parameters
        attributes: list[Dict] = [*map(_attributes_of, parameters)]
        world.dicts += attributes
        for own in filter(None, attributes):
            world.push(own.values())
    else:
        world.pending += parameters


def follow_named_tensor(world: World, module: nn.Module, name: str, tensor: Tensor) -> None:
    """Follow a tensor that a module holds by name."""
    if id(tensor) not in world.seen:
        world.seen.add(id(tensor))
        if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            world.state.append((module, name, tensor))
        watch_tensor(world, tensor)


def follow_tensor(world: World, tensor: Tensor) -> None:
    """Follow a tensor that is held anywhere else."""
    world.runs_code = True
    if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
        world.loose.append(tensor)
    watch_tensor(world, tensor)


def watch_tensor(world: World, tensor: Tensor) -> None:
    """Watch the version of a tensor, and follow its attributes."""
    if world.is_named:
        world.named.add(id(tensor))
    if not tensor.is_inference():  # inference tensors have no version, and cannot be written in a forward with grad
        world.tensors.append(tensor)
    follow_attributes(world, tensor)


def reach_arguments(world: World, tensors: Iterable[Tensor]) -> None:
    """Reach the attributes and the classes of tensors among the arguments, which are inputs themselves."""
    for tensor in tensors:
        if id(tensor) in world.seen:
            continue
        if is_wrapper(tensor):
            # Its parts are the memory of an input, which must not be kept alive here; a recompute has an alias of it
            # that has the other attributes.
            world.push(attributes_of(tensor).values())
            follow_class(world, type(tensor))
        else:
            follow_attributes(world, tensor)


def follow_attributes(world: World, tensor: Tensor) -> None:
    """Follow a tensor into its attributes and its class."""
    own = cast("Dict", tensor.__dict__)
    world.dicts.append(own)
    if own:
        world.push(own.values())
    if type(tensor) is not Tensor:
        follow_class(world, type(tensor))


def follow_parameter(world: World, tensor: Tensor) -> None:
    """Follow one parameter."""
    # Like `watch_tensor`, for by far the most tensors.
    world.tensors.append(tensor)
    own = cast("Dict", tensor.__dict__)
    world.dicts.append(own)
    if own:
        world.push(own.values())
    if world.is_named:
        world.named.add(id(tensor))


def follow_uninitialized(world: World, _: object) -> None:
    """Note that a lazy module has not made its parameters yet."""
    world.waits = True


def follow_generator(world: World, generator: torch.Generator) -> None:
    """Note a random generator of torch."""
    world.generators.append(generator)
