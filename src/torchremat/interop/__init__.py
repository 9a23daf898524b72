"""torchremat as a replacement of other libraries, and together with them.

torch_checkpoint/  the names of `torch.utils.checkpoint`
torchgpipe/        the names of torchgpipe
installing.py      these installed where third-party code has bound torch's

training.py         what a user asks of a budget for a training that a framework runs, and what the framework supplies
training_budget.py  such a budget
transformers.py     the same as a callback of transformers' Trainer, and of its subclasses
lightning.py        the same as a callback of Lightning's
accelerate.py       the same as a replacement of `accelerator.prepare`

The last three need the package that they are named after, and are imported when they are first asked for.
"""

import importlib
from types import ModuleType

_FRAMEWORKS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
