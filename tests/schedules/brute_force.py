"""All trees of a small chain, and an evaluator of them from the rules alone, which shares no code with the package.

Here a tree is nested tuples: `(3, 0)` is stage 3 kept with option 0, `[..]` is a region, and the whole is a list.
"""

import functools
import random

from torchremat.schedules.chain import Chain, KeepNode, Option, RegionNode, Stage


def make_option(saved=2, *, input=True, external=False, cost=0, peak=3, stopped=2, back=3, **more):
    return Option(
        saved_bytes=saved,
        saves_input=input,
        saves_external=external,
        cost=cost,
        forward_peak_bytes=peak,
        truncated_peak_bytes=stopped,
        backward_peak_bytes=back,
        **more,
    )


def make_stage(*options, forward=1, truncated=1, linked=1, external=0, output=1, drop=1, **more):
    return Stage(
        forward=forward,
        truncated=truncated,
        linked_bytes=linked,
        external_bytes=external,
        output_bytes=output,
        drop_peak_bytes=drop,
        options=options or (make_option(),),
        **more,
    )


def random_chain(seed, stages, options):
    draw, alone = random.Random(f"{seed} {stages} {options}"), random.Random(f"alone {seed} {stages} {options}")

    def option(number):
        return make_option(
            draw.randint(0, 6),
            input=draw.random() < 0.6,
            external=draw.random() < 0.5,
            cost=draw.randint(0, 4),
            peak=draw.randint(0, 9),
            stopped=draw.randint(0, 7),
            back=draw.randint(0, 9),
            is_region=number > 0 and alone.random() < 0.3,
        )

    def stage():
        forward = draw.randint(0, 6)
        return make_stage(
            *map(option, range(options)),
            forward=forward,
            truncated=draw.randint(0, forward),
            linked=draw.choice([0, 1, 1, 2, 4]),
            external=draw.choice([0, 0, 0, 1, 3]),
            output=draw.randint(0, 6),
            drop=draw.randint(0, 8) + draw.choice([0, 0, 0, 8]),
            forward_base_bytes=draw.choice([0, 0, 1, 5]),
            backward_base_bytes=draw.choice([0, 0, 1, 9]),
        )

    return Chain(stages=tuple(stage() for _ in range(stages)), tail_bytes=draw.choice([0, 2, 9]))


@functools.cache
def forests(first, end, options):
    """All lists of nodes over the stages first..end-1, but for regions whose only child is a region."""
    if first == end:
        return [[]]
    found = []
    for cut in range(first + 1, end + 1):
        for node in nodes(first, cut, options):
            found += [[node, *rest] for rest in forests(cut, end, options)]
    return found


@functools.cache
def nodes(first, end, options):
    if end == first + 1:
        kept = [(first, option) for option in range(options)]
        return kept + [[node] for node in kept]
    several = []
    for cut in range(first + 1, end):
        for node in nodes(first, cut, options):
            several += [[node, *rest] for rest in forests(cut, end, options)]
    return several


def span(node):
    """The stages of a node, each of which is the next after the one before it."""
    first = last = node
    while isinstance(first, list):
        first = first[0]
    while isinstance(last, list):
        last = last[-1]
    return range(first[0], last[0] + 1)


def trees(chain):
    """All trees that the chain allows; all its stages have equally many options."""
    return forests(0, len(chain.stages), len(chain.stages[0].options))


def as_tree(forest):
    return tuple(KeepNode(*node) if isinstance(node, tuple) else RegionNode(as_tree(node)) for node in forest)


def evaluate(chain, forest):
    """Return (peak, cost) of a tree."""
    stages, live, costs = chain.stages, [], []

    def backward(children, holds, outside):
        for place in reversed(range(len(children))):
            held = outside + sum(holds[: place + 1])
            if isinstance(children[place], tuple):
                number, option = children[place]
                stage, option = stages[number], stages[number].options[option]
                live.append(held + stage.backward_base_bytes + option.backward_peak_bytes)
                costs.append(option.cost)
            else:
                recompute(children[place], held)

    def recompute(region, outside):
        numbers, holds = span(region), []
        start, base = numbers[0], outside + stages[numbers[-1]].backward_base_bytes
        for child in region:
            number, last = span(child)[0], child is region[-1]
            stage, linked = stages[number], 0 if number == start else stages[number].linked_bytes
            if isinstance(child, tuple):
                option = stage.options[child[1]]
                peak = option.truncated_peak_bytes if last else option.forward_peak_bytes
                live.append(base + sum(holds) + linked + peak)
                costs.append((0 if option.is_region else stage.truncated) if last else stage.forward)
                holds.append(option.saved_bytes + (linked if option.saves_input else 0))
            else:
                holds.append(linked)
                if not last:
                    drop(span(child), [base + sum(holds)] * len(span(child)))
                    costs.extend(stages[inner].forward for inner in span(child))
        backward(region, holds, outside)

    def drop(numbers, over):
        for number, entry in zip(numbers, over, strict=True):
            beside = 0 if number == numbers[0] else stages[number].linked_bytes
            live.append(entry + beside + stages[number].drop_peak_bytes)
            live.append(entry + stages[number].output_bytes)

    holds = []
    for node in forest:
        numbers = span(node)
        stage = stages[numbers[0]]
        if isinstance(node, tuple):
            option = stage.options[node[1]]
            inputs = stage.linked_bytes + stage.external_bytes
            live.append(sum(holds) + stage.forward_base_bytes + inputs + option.forward_peak_bytes)
            saved = stage.linked_bytes * option.saves_input + stage.external_bytes * option.saves_external
            holds.append(option.saved_bytes + saved)
        else:
            holds.append(stage.linked_bytes + sum(stages[number].external_bytes for number in numbers))
            drop(numbers, [sum(holds) + stages[number].forward_base_bytes for number in numbers])
    live.append(sum(holds) + chain.tail_bytes)
    backward(forest, holds, 0)
    return max(live), sum(costs)


def shape(tree):
    """Stages in order, regions in brackets."""
    return " ".join(str(node.stage) if isinstance(node, KeepNode) else f"[{shape(node.children)}]" for node in tree)
