"""What stands in place of a gradient that was freed.

NOTE [ A freed gradient is not None ]
`None` means that no gradient came, and code that finds it goes on: `clip_grad_norm_` returns a norm of 0, a loss scaler
finds no infinity, a log writes nothing. All of it would be wrong in silence. So `.grad` is a tensor without memory that
knows why it has none; `is None` and `zero_grad()` work as ever, and whatever reads or adds to it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from torchremat._compat.modes import Args, Kwargs
from torchremat._compat.tensors import no_torch_function, shell_of
from torchremat.errors import UnsupportedError, bug
from torchremat.tensors.structure import tensors_in


class ReleasedGradient(Tensor):
    """The gradient of a parameter that has made its step. See NOTE [ A freed gradient is not None ].

    Args:
        parameter: The parameter.
        words: Returns the message for code that reads it.
    """

    _words: Callable[[], str]
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls: type[ReleasedGradient], parameter: Tensor, words: Callable[[], str]) -> ReleasedGradient:
        """Make one of the parameter's shape, dtype and device."""
        made = shell_of(ReleasedGradient, parameter)
        made._words = words
        return made

    def stands_for(self, parameter: Tensor) -> bool:
        """Return whether it can be the gradient of a parameter, whose shape or dtype may have changed since."""
        return (self.shape, self.dtype, self.device) == (parameter.shape, parameter.dtype, parameter.device)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: Args = (), kwargs: Kwargs = None) -> NoReturn:
        """Raise: some operator would read it."""
        found = next((one for one in tensors_in((args, kwargs)) if isinstance(one, ReleasedGradient)), None)
        raise bug(f"{func} is given no gradient") if found is None else UnsupportedError(found._words())

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        """Return that no other tensors are inside, so that code which counts bytes finds none."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: object) -> NoReturn:
        """Raise: nothing makes one but a release."""
        raise bug("a released gradient is made from parts")

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise: there is nothing to save."""
        raise UnsupportedError(self._words())

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ReleasedGradient(shape={tuple(self.shape)})"
