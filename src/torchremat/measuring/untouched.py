"""`untouched`: run somebody's training step and leave no sign of it.

Put back, whether the block ends or raises (KeyboardInterrupt included, and one that comes meanwhile waits):

    gradients        the same `.grad` objects with the same values; during the block there are zeros in their place
    buffers          the same objects, values and versions; those assigned or registered in the block are dropped
    RNG              torch on the CPU and on every CUDA device, Python's `random`, NumPy's global generator
    training flags   of every module

Not put back, for nobody can know about it: weights (a step that calls `optimizer.step()` has changed them), attributes
that are no buffers (a cache in `self.cache`), generators that the step made itself, a data loader that has moved on.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from torchremat.measuring.bindings import set_version
from torchremat.measuring.interrupts import uninterrupted


@contextmanager
def untouched(
    model: nn.Module | Iterable[nn.Module] | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tensors: Iterable[Tensor] = (),
) -> Generator[None]:
    """Set gradients aside for the block, and afterwards put back gradients, buffers, generators and training flags.

    Inside the block every leaf that can receive a gradient has one, of zeros: the step accumulates, as every step but
    the first does without `set_to_none`, and the bytes of gradients are the same in each.

    Args:
        model: The model, or several, or None.
        optimizer: Its parameters are treated like the model's; they may be others.
        tensors: Further tensors; the leaves among them that require grad are treated like parameters.
    """
    models = [model] if isinstance(model, nn.Module) else list(model or ())
    modules = list({id(module): module for root in models for module in root.modules()}.values())
    leaves = gradient_leaves(models, optimizer, tensors)
    # Each part enters by itself, so that an interrupt in the middle undoes the parts before it.
    with ExitStack() as stack:
        stack.enter_context(_generators())
        stack.enter_context(_training_flags(modules))
        stack.enter_context(_buffers(modules))
        stack.enter_context(_gradients(leaves))
        try:
            yield
        finally:
            with uninterrupted():
                stack.close()


def gradient_leaves(
    models: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None, tensors: Iterable[Tensor] = ()
) -> list[Tensor]:
    """Return the leaves that backward may give a gradient to, each once, in the order of the arguments."""
    candidates: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    if optimizer is not None:
        for group in cast("list[dict[str, list[Tensor]]]", optimizer.param_groups):
            candidates += group["params"]
    candidates.extend(tensors)
    return [tensor for tensor in {id(t): t for t in candidates}.values() if tensor.is_leaf and tensor.requires_grad]


@contextmanager
def _gradients(leaves: list[Tensor]) -> Generator[None]:
    aside = [leaf.grad for leaf in leaves]
    try:
        for leaf, grad in zip(leaves, aside, strict=True):
            leaf.grad = torch.zeros_like(leaf if grad is None else grad, requires_grad=False)
        yield
    finally:
        for leaf, grad in zip(leaves, aside, strict=True):
            leaf.grad = grad


@contextmanager
def _buffers(modules: list[nn.Module]) -> Generator[None]:
    # With the non-persistent ones. The table of a ScriptModule is C++'s: nobody can assign to it from here either.
    tables = [(module, dict(module._buffers)) for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    buffers = list({id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}.values())
    copies = [(buffer, buffer.detach().clone(), _version(buffer)) for buffer in buffers]
    try:
        yield
    finally:
        for module, table in tables:
            module._buffers.clear()  # `register_buffer` would refuse the name
            module._buffers.update(table)
        for buffer, copy, version in copies:
            if _version(buffer) != version or not _same_bytes(buffer, copy):
                # A graph of the user's may have saved this buffer. It is what it was, so neither this write nor
                # those of the step may count as a change: written through `.data`, and the version put back.
                if buffer.shape == copy.shape:
                    buffer.data.copy_(copy)
                else:
                    buffer.data = copy
                if version is not None:
                    set_version(buffer, version)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_bytes(tensor: Tensor, copy: Tensor) -> bool:
    # Writes through `.data` or NumPy leave the version alone. NaN equals NaN here.
    if tensor.shape != copy.shape:
        return False
    return torch.equal(tensor, copy) or bool(torch.all((tensor == copy) | ((tensor != tensor) & (copy != copy))))


@contextmanager
def _training_flags(modules: list[nn.Module]) -> Generator[None]:
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _generators() -> Generator[None]:
    cpu = torch.get_rng_state()
    # A process without a CUDA context has no CUDA generators yet, and asking for them would make the context: 0.5 GB.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def written_back(tensors: Iterable[Tensor]) -> Generator[None]:
    """Put the values and versions of tensors back after the block. The copies lie in host memory."""
    copies = [(tensor, tensor.detach().to("cpu", copy=True), _version(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        with uninterrupted():
            for tensor, copied, version in copies:
                tensor.data.copy_(copied)
                if version is not None:
                    set_version(tensor, version)
