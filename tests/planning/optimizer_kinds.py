"""Optimizers of every shape that people hand over: ones around others, with hooks, with state in odd places."""

import weakref
from collections import defaultdict

import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR


class Forwarding(Optimizer):
    """As accelerate's: its state, options and step are those of the one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def step(self, closure=None):
        self.steps += 1
        self.optimizer.step(closure)


class Lookahead(Optimizer):
    """As timm's: an empty state of its own, and slow weights in that of the one inside."""

    def __init__(self, base):
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for parameter in group["params"]:
                state = self._base_optimizer.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)


class LateLookahead(Optimizer):
    """As timm's: the slow weights come at the sixth step."""

    def __init__(self, base, k=6):
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        self.k = k
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.k:
                continue
            for parameter in group["params"]:
                state = self._base_optimizer.state[parameter]
                if "slow" not in state:
                    state["slow"] = torch.empty_like(parameter).copy_(parameter)
                state["slow"].add_(parameter - state["slow"], alpha=0.5)
                parameter.copy_(state["slow"])


class Imitating:
    """As Lightning's: its class is made for it, and its trainer, which it knows weakly, steps and runs hooks."""

    def __init__(self, optimizer, trainer):
        self._optimizer = optimizer
        self._trainer = weakref.proxy(trainer)
        self.__class__ = type(f"Imitating{type(optimizer).__name__}", (Imitating, type(optimizer)), {})

    def step(self, closure=None):
        self._trainer.step(self._optimizer, closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Trainer:
    def __init__(self):
        self.steps, self.log = 0, []

    def step(self, optimizer, closure):
        self.steps += 1
        self.log.append("step")
        optimizer.step(closure)


class Joined(Optimizer):
    """Two optimizers, each with a half of the parameters."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        self.state = {}

    @property
    def param_groups(self):
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self, closure=None):
        for one in self.optimizers:
            one.step(closure)


class Factor:
    def __init__(self, parameter):
        self.sums = torch.zeros_like(parameter)
        self.calls = 0


class Preconditioned(Optimizer):
    """State in objects, in attributes and in more than a thousand items of a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": torch.tensor(0.01)})
        self.counts = [0] * 2000
        self.average = torch.zeros(3)
        self.first = None

    @torch.no_grad()
    def step(self, closure=None):
        self.counts[1500] += 1
        self.average.add_(1)
        self.first = torch.ones(2)
        for group in self.param_groups:
            group["lr"].mul_(0.5)
            for parameter in group["params"]:
                factor = self.state[parameter].setdefault("factor", Factor(parameter))
                factor.calls += 1
                factor.sums.add_(parameter.grad.square() + 1)
                parameter.sub_(group["lr"] * factor.sums)


def plain(parameters):
    return AdamW(parameters, lr=0.01)


def forwarding(parameters):
    return Forwarding(plain(parameters))


def forwarding_twice(parameters):
    return Forwarding(Forwarding(Lookahead(plain(parameters))))


def lookahead(parameters):
    return Lookahead(plain(parameters))


def late_lookahead(parameters):
    return LateLookahead(plain(parameters))


def imitating(parameters):
    trainer = Trainer()
    made = Imitating(plain(parameters), trainer)
    made._optimizer.trainer = [trainer]  # so that it lives
    return made


def joined(parameters):
    parameters = list(parameters)
    return Joined(SGD(parameters[::2], lr=0.1, momentum=0.9), plain(parameters[1::2]))


def preconditioned(parameters):
    return Preconditioned(parameters)


def scheduled(parameters):
    """A scheduler that counts the optimizer's steps in its place, and one that a hook runs."""
    inner = plain(parameters)
    schedules = StepLR(inner, 1, 0.5), StepLR(inner, 2, 0.5)
    inner.register_step_post_hook(lambda *_: schedules[1].step())
    return inner


def scheduled_inside(parameters):
    return Forwarding(scheduled(parameters))


def with_a_closure(parameters):
    """Somebody has put a function in the place of its step, which counts in a cell."""
    made, calls = plain(parameters), [0]
    step = made.step

    def counted(*args):
        calls[0] += 1
        return step(*args)

    made.step = counted
    return Forwarding(made)


KINDS = [
    plain, forwarding, forwarding_twice, lookahead, late_lookahead, imitating, joined, preconditioned, scheduled,
    scheduled_inside, with_a_closure,
]  # fmt: skip


def _insides(item, seen, path):
    """Yield all that can be reached from an optimizer, as what can be compared: paths with ids, values and versions."""
    if isinstance(item, torch.Tensor):
        yield path, id(item), item.detach().clone(), item._version, item.requires_grad
        return
    if isinstance(item, int | float | str | bool | None):
        yield path, item
        return
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, dict):
        pairs = [(f"[{place}]", one) for place, one in enumerate(item.values())]
        yield path, id(item), [id(key) if isinstance(key, torch.Tensor) else key for key in item]
    elif isinstance(item, list | tuple):
        pairs = [(f"[{place}]", one) for place, one in enumerate(item)]
        yield path, id(item), len(item)
    elif callable(item) and getattr(item, "__closure__", None):
        pairs = [(f"<{place}>", one.cell_contents) for place, one in enumerate(item.__closure__)]
    elif type(item).__name__ in ("ProxyType", "method", "function"):
        return
    else:
        pairs = [(f".{name}", one) for name, one in getattr(item, "__dict__", {}).items()]
        yield path, id(item), type(item), [name for name, _ in pairs]
    for name, one in pairs:
        yield from _insides(one, seen, path + name)


def insides(*items):
    """Return what optimizers and models hold now, however deep."""
    seen = set()
    return [line for place, item in enumerate(items) for line in _insides(item, seen, str(place))]


def changes(before, after):
    """Return the paths at which two such lists differ."""
    if [line[0] for line in before] != [line[0] for line in after]:
        return sorted({line[0] for line in before} ^ {line[0] for line in after}) or ["order"]
    return [a[0] for a, b in zip(before, after, strict=True) if not all(map(_equal, a, b))]


def _equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
