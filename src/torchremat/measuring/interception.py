"""`intercepted`: the forward of every module of a model, routed through one function for a block."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import nn

from torchremat.measuring.modules import visible_modules
from torchremat.regions.forwards import class_forward
from torchremat.regions.patches import called_attribute, is_replaceable


@contextmanager
def intercepted(model: nn.Module, run: Callable[..., object]) -> Generator[None]:
    """Route the forward of every module of the model through `run(name, module, function, args, kwargs)`.

    A module compiled by `module.compile()` is routed as a whole, since dynamo would trace anything put inside it.
    """
    changed: list[tuple[nn.Module, str, object]] = []
    try:
        for name, module in visible_modules(model):
            if not is_replaceable(module):
                continue  # a part of its caller
            attribute = called_attribute(module)
            own = module.__dict__.get(attribute)
            function = class_forward(module) if own is None else own

            def forward(
                *args: object,
                _name: str = name,
                _module: nn.Module = module,
                _function: Callable[..., object] = function,
                **kwargs: object,
            ) -> object:
                return run(_name, _module, _function, args, kwargs)

            changed.append((module, attribute, own))
            module.__dict__[attribute] = forward
        yield
    finally:
        for module, attribute, own in changed:
            if own is None:
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = own
