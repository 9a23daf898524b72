"""torchremat in the place of other libraries, and beside them.

torch_checkpoint    the names of `torch.utils.checkpoint`
installing.py       these put where third-party code has bound torch's

budgets.py          a budget for a training that a framework runs
transformers.py     the same as a callback of transformers' Trainer, and of the trainers that are made from it
lightning.py        the same as a callback of Lightning's
accelerate.py       the same in the place of `accelerator.prepare`

The last three need the package that they are named after, and are imported when they are first asked for.
"""

import importlib
from types import ModuleType

_FRAMEWORKS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
