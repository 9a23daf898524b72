"""The best tree for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

    candidates    the optimal persistent schedules for a range of limits (one table has them all), the uniform trees
    judge         `predict`: exact bytes by storage, the executor's own cost
    polish        regions of the best tree are dissolved as long as the limit allows

The chain's scalars err to both sides, so the limit that is asked of the solver is searched: the highest whose tree
fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchremat.planning.cargo import NO_LOADS, Loads, Offer
from torchremat.planning.chains import Cost, amount, chain_of
from torchremat.planning.mixing import divisible, mixed
from torchremat.planning.options import options_of
from torchremat.planning.prediction import Prediction, predict
from torchremat.planning.profiling import Grains
from torchremat.planning.reading import Profile
from torchremat.planning.storing import Storing
from torchremat.planning.units import Unit, Units
from torchremat.schedules.chain import Chain, Keep, Region, Tree
from torchremat.schedules.persistent import Persistent
from torchremat.schedules.uniform import candidates

# Which shares of the units that can be split are, how many at the end, and up to how many units.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_AT_THE_END = (1, 2, -1)
_MOST_UNITS = 61

# A unit with so many options is not taken apart: on a GPT and a U-Net, whose blocks have 4 to 7, that won nothing. The
# blocks of a ResNet have 2 or 3, since writes in place and batch normalisation run again whatever is held.
_MANY_OPTIONS = 4

# How many trees are judged beside those that the search for a limit passes: fewer if there are many units, since each
# takes longer then.
_JUDGED_UNITS = 4000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tree over the units of a profile, with what it needs; `cost` is in the unit that is planned for.

    `loads` are the kept units whose saved tensors go to a store.
    """

    profile: Profile
    tree: Tree
    prediction: Prediction
    cost: float
    loads: Loads = field(default_factory=lambda: NO_LOADS, hash=False)


class Search:
    """Finds trees under any limit, with whole units and with some of them taken apart.

    Blocks are mostly alike, so how many are taken apart matters more than which: the mixtures tried have a quarter, a
    half, three quarters and all of them split, evenly spread. The last ones are special, since all that is kept is live
    together with what they save: there are mixtures with the last one, the last two and all but the first as well. All
    of this as long as the units stay few enough to plan in a second, and only for units without many options.

    Args:
        grains: The profile.
        cost: What to minimise.
        offers: Stores, with what each unit would put there.
        operators: Whether units may be kept in part.
    """

    def __init__(self, grains: Grains, cost: Cost, offers: Sequence[Offer] = (), *, operators: bool = True) -> None:
        # What is kept in part is not stored, so with stores whole units are sought.
        self.offers = offers
        self.storing = Storing(Solver(grains.coarse, cost), offers)
        if operators:
            grains = replace(grains, coarse=replace(grains.coarse, options=options_of(grains.coarse, cost)))
        self.grains = grains
        self.cost_unit: Cost = cost
        self.coarse = Solver(grains.coarse, cost)

    @property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.coarse.plain

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        """One solver for each mixture."""
        calls = self.grains.coarse.units.trace.calls
        # A module is split in all of its calls or in none: its wrapped forward could not tell one from the other.
        by_name: dict[str, set[int]] = {}
        for call in sorted(divisible(self.grains) - self._with_options()):
            by_name.setdefault(calls[call].name, set()).add(call)
        whole = list(by_name.values())
        splits: dict[frozenset[int], None] = {}
        for share in _SHARES:
            count = round(share * len(whole))
            chosen = [whole[(2 * i + 1) * len(whole) // (2 * count)] for i in range(count)]
            splits[frozenset[int]().union(*chosen)] = None
        for count in _AT_THE_END:
            splits[frozenset[int]().union(*whole[-count:])] = None
        splits.pop(frozenset(), None)
        units, parts = self.grains.coarse.units, self.grains.coarse.units.trace.children
        fitting = [
            split for split in splits if len(units.units) + sum(len(parts(call)) - 1 for call in split) <= _MOST_UNITS
        ]
        mixtures = [mixed(self.grains, split) for split in fitting]
        return (self.coarse, *(Solver(mixture, self.cost_unit, hand_made=False) for mixture in mixtures))

    def _with_options(self) -> set[int]:
        """The calls of units that can be kept in so many ways that to take them apart wins nothing."""
        if self.cost_unit == "seconds":
            return set()  # regions of calls inside do without a policy, and save its seconds
        coarse = self.grains.coarse
        units = zip(coarse.units.units, coarse.options, strict=False)
        return {unit.calls[0] for unit, options in units if len(options) >= _MANY_OPTIONS}

    @property
    def storings(self) -> Iterator[Storing]:
        """Yield what finds candidates with stores: of whole units, then of the mixture with the most units."""
        if self.offers:
            yield self.storing
            finest = max(self.solvers, key=lambda solver: len(solver.profile.units.units))
            if finest is not self.coarse:
                yield Storing(finest, self.offers)

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        found: list[Candidate] = []
        for storing in self.storings:
            stored = storing.solve(limit_bytes)
            if stored is not None and not stored.cost:
                return stored
            found += [] if stored is None else [stored]
        found += [one for solver in self.solvers if (one := solver.solve(limit_bytes)) is not None]
        if not found and self.floor.prediction.peak_bytes <= limit_bytes:
            return self.floor
        return min(found, key=lambda one: (one.cost, bool(one.loads), one.prediction.peak_bytes), default=None)

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        stored = (one for storing in self.storings for one in storing.lowest)
        lowest = (*(solver.floor for solver in self.solvers), *stored)
        return min(lowest, key=lambda one: (one.prediction.peak_bytes, one.cost))


class Solver:
    """Finds trees for one profile, under any limit; limits and peaks are bytes over those at the start of the step.

    Args:
        profile: The profile.
        cost: What to minimise.
        hand_made: Whether uniform trees, as people write them by hand, are candidates. In mixtures they win nothing.
    """

    def __init__(self, profile: Profile, cost: Cost, *, hand_made: bool = True) -> None:
        self.profile = profile
        self.cost_unit: Cost = cost
        self.hand_made = hand_made
        self._known: dict[Tree, Candidate] = {}

    @cached_property
    def chain(self) -> Chain:
        """The profile as scalars."""
        return chain_of(self.profile, self.cost_unit)

    @cached_property
    def options(self) -> list[int]:
        """How many options each unit has, that of keeping everything included."""
        return [len(stage.options) for stage in self.chain.stages]

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.judged(tuple(Keep(unit) for unit in range(len(self.profile.units.units))))

    @cached_property
    def table(self) -> Persistent:
        """The optimal persistent schedules of the chain."""
        return Persistent(self.chain, max(1, int(1.1 * self.plain.prediction.peak_bytes)))

    @property
    def most_judged(self) -> int:
        """How many trees may be judged for polish, and a third of it for the floor."""
        return max(12, _JUDGED_UNITS // len(self.profile.units.units))

    @cached_property
    def uniform(self) -> tuple[Candidate, ...]:
        """The uniform trees, every one for few units, those with few regions or long strides for many."""
        trees = candidates(self.chain) if self.hand_made else {}
        chosen = [tree for name, tree in trees.items() if len(trees) <= 120 or _is_simple(name)]
        return tuple(self.judged(tree) for tree in chosen)

    def judged(self, tree: Tree) -> Candidate:
        """Return a tree, made fit for the roots, with its prediction."""
        tree = fitted(self.profile.units, tree)
        if tree not in self._known:
            prediction = predict(self.profile, tree)
            cost = amount(
                self.profile,
                self.cost_unit,
                seconds=prediction.seconds,
                nominal_s=prediction.nominal_s,
                flops=prediction.flops,
            )
            self._known[tree] = Candidate(profile=self.profile, tree=tree, prediction=prediction, cost=cost)
        return self._known[tree]

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none was, see `floor`."""
        found = self.unpolished(limit_bytes)
        return None if found is None else self.polished(found, limit_bytes)

    def unpolished(self, limit_bytes: int) -> Candidate | None:
        """Return what `solve` starts its polish from."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        found = [*self.persistent(limit_bytes), *self.uniform]
        fitting = [one for one in found if one.prediction.peak_bytes <= limit_bytes]
        return min(fitting, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)

    def persistent(self, limit_bytes: int) -> Iterator[Candidate]:
        """Yield optimal trees of the chain, closing in on the one of the most slots whose exact peak fits."""
        fits, above = self.table.lowest_slots, self.table.most_slots + 1
        # Begin where the chain's own scalars put the limit: mostly it is there or nearby.
        asked, reach = min(max(limit_bytes // self.table.slot_bytes, fits), above - 1), 1
        while fits < above:
            one = self.judged(self.table.tree_at(asked))
            yield one
            if one.prediction.peak_bytes <= limit_bytes:
                fits = asked + 1
                asked = min(asked + reach, (asked + above) // 2)
            else:
                above = asked
                asked = max(asked - reach, (fits + asked) // 2)
            reach *= 4
            asked = min(max(asked, fits), above - 1)

    def polished(self, best: Candidate, limit_bytes: int, *, most_judged: int | None = None) -> Candidate:
        """Return a tree with regions dissolved, or their ends let out, where the limit allows; one pass."""
        units = len(self.profile.units.units)
        if best.prediction.calls > 20 * units:
            return best  # nested so deeply that the limit leaves no room
        place, judged, most = 0, len(self._known), self.most_judged if most_judged is None else most_judged
        while place < len(best.tree) and len(self._known) - judged < most:
            loosened = [self.judged(tree) for tree in _loosened(best.tree, place, self.options)]
            fitting = [one for one in loosened if one.prediction.peak_bytes <= limit_bytes and one.cost < best.cost]
            if fitting:
                best = min(fitting, key=lambda one: one.cost)
            else:
                place += 1
        return best

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        found = list(self.uniform)
        lowest, most = self.table.lowest_slots, self.table.most_slots
        steps = min(16, self.most_judged // 3)
        for asked in sorted({min(most, lowest + lowest * place // (2 * steps)) for place in range(steps)}):
            if asked >= lowest:
                found.append(self.judged(self.table.tree_at(asked)))
        return min(found, key=lambda one: (one.prediction.peak_bytes, one.cost))


def _is_simple(name: str) -> bool:
    number = "".join(letter for letter in name if letter.isdigit())
    return not number or int(number) <= 12


def _loosened(tree: Tree, place: int, options: list[int]) -> Iterator[Tree]:
    """Yield trees that keep a little more at one place.

    A region is dissolved, or loses its first or last child; what is kept is kept as another of its options.
    """
    node = tree[place]
    before, after = tree[:place], tree[place + 1 :]
    if isinstance(node, Keep):
        for option in range(options[node.stage]):
            if option != node.option:
                yield (*before, Keep(node.stage, option), *after)
    else:
        if len(node.children) == 1:
            for option in range(1, options[node.first]):
                yield (*before, Keep(node.first, option), *after)
        yield (*before, *node.children, *after)
        if len(node.children) > 1:
            first, *rest = node.children
            yield (*before, first, Region(tuple(rest)), *after)
            *most, last = node.children
            yield (*before, Region(tuple(most)), last, *after)


def fitted(units: Units, tree: Tree) -> Tree:
    """Return the tree with no region across two calls of a root, and calls of the same root treated alike.

    A root that is called several times in a step has one scope, whose choices hold for each of its calls. Nor has it
    regions over several modules that FSDP2 has sharded, which gathers the parameters of one at a time.
    """
    if units.trace.sharded:
        labels = [_shard_of(unit, units.trace.sharded) for unit in units.units]
        tree = tuple(_parted(tree, labels))
    groups: list[list[int]] = []
    for index, unit in enumerate(units.units):
        if unit.root == len(groups):
            groups.append([])
        elif unit.root > len(groups):  # a root without units
            groups += [[] for _ in range(unit.root - len(groups) + 1)]
        groups[unit.root].append(index)
    if len(groups) <= 1:
        return tree
    result: list[Keep | Region] = []
    model: dict[tuple[tuple[tuple[str, int], ...], ...], tuple[int, Tree]] = {}
    for group in filter(None, groups):
        key = tuple(units.units[index].keys for index in group)
        if key in model:
            start, known = model[key]
            part = tuple(_shifted(node, group[0] - start) for node in known)
        else:
            part = tuple(_within(tree, group[0], group[-1]))
            model[key] = (group[0], part)
        result += part
    return tuple(result)


def _shard_of(unit: Unit, sharded: frozenset[str]) -> str:
    """Return what tells the units of one sharded module from others: a unit that is one itself is alone."""
    name = unit.keys[0][0]
    if name in sharded:
        return unit.name
    parents = [name.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return next((f"inside {parent}" for parent in parents if parent in sharded), "")


def _parted(nodes: Iterable[Keep | Region], labels: Sequence[str]) -> Iterator[Keep | Region]:
    for node in nodes:
        if isinstance(node, Region) and len(set(labels[node.first : node.last + 1])) > 1:
            inner = _parted(node.children, labels)
            yield from (child if isinstance(child, Region) else Region((child,)) for child in inner)
        else:
            yield node


def _within(nodes: Iterable[Keep | Region], first: int, last: int) -> Iterator[Keep | Region]:
    for node in nodes:
        if isinstance(node, Keep):
            if first <= node.stage <= last:
                yield node
        else:
            children = tuple(_within(node.children, first, last))
            if children:
                yield Region(children)


def _shifted(node: Keep | Region, by: int) -> Keep | Region:
    if isinstance(node, Keep):
        return Keep(node.stage + by, node.option)
    return Region(tuple(_shifted(child, by) for child in node.children))
