"""The binomial schedules of loops as trees of regions."""

from itertools import pairwise

from torchremat.schedules.binomial import first_borders
from torchremat.schedules.chain import KeepNode, RegionNode


def binomial_tree(steps, slots):
    """The binomial schedule as a tree of regions, in which the last step of each stretch is recorded."""

    def nodes(first, end, free, is_held):
        borders = [*first_borders(end - first, free), end - first]
        made = []
        for number, (begin, stop) in enumerate(pairwise(borders)):
            last = stop == end - first
            inner = (first + begin, first + stop, free - number)
            if last and stop - begin == 1:
                made.append(KeepNode(first + begin))
            elif last:
                made += [RegionNode(tuple(nodes(inner[0], inner[1] - 1, inner[2], True))), KeepNode(first + stop - 1)]
            else:
                made.append(RegionNode(tuple(nodes(*inner, True))))
        return made

    return tuple(nodes(0, steps, slots, False))
