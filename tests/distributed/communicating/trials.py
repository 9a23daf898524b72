"""One program in one process: trained plainly, and under plans, and what differs."""

import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

import torchremat
from distributed.communicating.parts import Working, batch
from torchremat import BudgetError, TorchrematError

STEPS = 3
_SPIN_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much slower a process is: by a busy loop in random ones of its blocks.

    Attributes:
        rank: The process; None for none.
    """

    rank: int | None = None

    def put(self, model, rank, seed):
        """Slow the blocks of a model, if this is the process."""
        rng = random.Random(seed)
        for module in model.modules():
            if isinstance(module, Working):
                module.spin_s = _SPIN_S * rng.randint(0, 2) * (rank == self.rank)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What one plan did in one process.

    Attributes:
        budget: The budget, as it was given.
        budget_bytes: The same in bytes.
        peak_bytes: The measured peak of a step.
        is_exact: What `verify` says.
        choice: What the plan does with the units, as one string.
        recomputes: Module calls that the plan recomputes.
        calls: Calls of blocks beyond those of the plain training.
        recomputed_share: Predicted seconds of recomputes, over those of a plain step.
        differs: What differs from the plain training.
    """

    budget: str
    budget_bytes: int
    peak_bytes: int
    is_exact: bool | None
    choice: str
    recomputes: int
    calls: int
    recomputed_share: float
    differs: tuple[str, ...]

    @property
    def is_above(self):
        """Whether the peak is above the budget."""
        return self.peak_bytes > self.budget_bytes


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a process found: a plan for each budget, or why there is none, and what the library warned of."""

    plans: tuple[Planned, ...] = ()
    refused: str = ""
    warned: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Training:
    """A program that trains: the loss, gradients and parameters of its steps by name, and calls of its blocks."""

    program: object
    seed: int
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.optimizer = self.program.optimizer(self.program.model.parameters())

    def step(self, model, number=0):
        return self.program.loss(model, batch(self.seed, number, self.program.stream))

    def run(self):
        """Train; return how many blocks were called meanwhile."""
        model, before = self.program.model, self.calls()
        for number in range(STEPS):
            self.optimizer.zero_grad()
            loss = self.step(model, number)
            loss.backward()
            self.found[f"loss {number}"] = _own(loss.detach())
            for name, one in model.named_parameters():
                self.found[f"gradient {number} of {name}"] = torch.zeros(0) if one.grad is None else _own(one.grad)
            self.optimizer.step()
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            self.found[name] = _own(one.detach())
        return self.calls() - before

    def calls(self):
        return sum(one.ran.value for one in self.program.model.modules() if isinstance(one, Working))


def _own(tensor):
    """A copy of what this process has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def tried(build, rank, *, seed, load, budgets, **options):
    """Train the program that `build` makes plainly, and a new one under a plan for each budget.

    The seed of the parameters is the same in all processes. A `TorchrematError` before training counts as a refusal;
    instead of a budget that no plan fits the smallest one is taken. The options are those of `plan`.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        plain = _begun(build, rank, seed, load)
        with plain.program.within():
            once = plain.run()
        assert all(one.isfinite().all() for one in plain.found.values()), "the plain training has no finite results"
        del heard[:]
        try:
            plans = tuple(_under(budget, _begun(build, rank, seed, load), plain, once, options) for budget in budgets)
        except _RefusedError as refused:
            return Told(refused=str(refused), warned=_of_ours(heard, plain.program))
    return Told(plans=plans, warned=_of_ours(heard, plain.program))


class _RefusedError(Exception):
    pass


@contextmanager
def _refusals(ours):
    """Where a program is planned: an error of the library says that it will not be trained."""
    with ours.program.within():
        try:
            yield
        except TorchrematError as error:
            raise _RefusedError(_said(error)) from error


def _said(error):
    return f"{type(error).__name__}: {error}"


def _of_ours(heard, program):
    """What the library has warned of, without what the program is known for."""
    ours = [one for one in heard if one.category.__module__.partition(".")[0] == "torchremat"]
    return tuple(dict.fromkeys(_said(one.message) for one in ours if not issubclass(one.category, program.known_for)))


def _begun(build, rank, seed, load):
    torch.manual_seed(seed)
    program = build()
    load.put(program.model, rank, seed)
    training = Training(program=program, seed=seed)
    for _ in range(program.warmed):
        training.step(program.model).backward()
        training.optimizer.zero_grad()
    return training


def _under(budget, ours, plain, once, options):
    """What a plan for a budget does to a training that has not begun."""
    model = ours.program.model
    with _refusals(ours):
        how = {"optimizer": ours.optimizer, "progress": False, **options}
        try:
            chosen = torchremat.plan(model, ours.step, budget=budget, **how)
        except BudgetError:
            chosen = torchremat.plan(model, ours.step, budget="min", **how)
        chosen.apply(model)
        report = torchremat.verify(model, ours.step, optimizer=ours.optimizer, progress=False)
    with ours.program.within():
        calls = ours.run() - once
    assert ours.found.keys() == plain.found.keys()
    return Planned(
        budget=chosen.budget,
        budget_bytes=chosen.budget_bytes,
        peak_bytes=report.peak_bytes,
        is_exact=report.is_exact,
        choice=repr((chosen.tree, chosen.held, chosen.stored)),
        recomputes=chosen.recomputed_calls,
        calls=calls,
        recomputed_share=chosen.recompute_seconds / chosen.plain_seconds,
        differs=tuple(name for name, one in plain.found.items() if not torch.equal(one, ours.found[name])),
    )


def faults(told, *, may_be_refused=False, are_alike=True):
    """What is wrong with what all processes found, in words; "" if nothing is.

    Args:
        told: What each found.
        may_be_refused: Whether a refusal by all is fine, and a plan that recomputes nothing.
        are_alike: Whether all communicate, so that they need one plan.
    """
    refused = [one.refused for one in told]
    if all(refused):
        return "" if may_be_refused else f"refused: {refused[0]}"
    if any(refused):
        return f"refused by some alone: {refused}"
    lines = [f"process {rank} was warned: {words}" for rank, one in enumerate(told) for words in one.warned]
    for plans in zip(*(one.plans for one in told), strict=True):
        lines += [f"{plans[0].budget}, process {rank}: {x}" for rank, one in enumerate(plans) for x in _faults_of(one)]
        if not may_be_refused and any(one.recomputes and not one.calls for one in plans):
            lines.append(f"{plans[0].budget}: nothing was recomputed")
        if are_alike and len({one.choice for one in plans}) > 1:
            lines.append(f"{plans[0].budget}: other plans in other processes")
    if not may_be_refused and not any(one.recomputes for one in told[0].plans):
        lines.append("no plan recomputes anything")
    return "\n".join(lines)


def _faults_of(plan):
    if plan.differs:
        yield f"{len(plan.differs)} tensors differ: {', '.join(plan.differs[:3])}"
    if plan.is_exact is False:
        yield "not exact, says `verify`"
    if plan.is_above:
        yield f"{plan.peak_bytes} bytes in a budget of {plan.budget_bytes}"
