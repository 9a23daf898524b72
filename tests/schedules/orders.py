"""Orders of pipelines from the literature, and costs for them."""

from torchremat.schedules.pipelines import LETTERS, Action, clock_cycles


def text(order):
    """Return each worker's actions as one line, like "F0.0 B0.0"."""
    return [" ".join(map(str, actions)) for actions in order]


def parse(lines):
    """Return the order that `text` wrote."""
    kinds = {letter: kind for kind, letter in LETTERS.items()}

    def action(word):
        stage, microbatch = map(int, word[1:].split("."))
        return Action(kind=kinds[word[0]], stage=stage, microbatch=microbatch)

    return tuple(tuple(map(action, line.split())) for line in lines)


def gpipe(microbatches, stages, *, in_reverse=True):
    """Return GPipe's order: all forwards, then all backwards.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, figure 2.

    Args:
        microbatches: At least 1.
        stages: At least 1; each has a worker.
        in_reverse: Whether the last microbatch comes back first; torch's `ScheduleGPipe` begins with the first.
    """
    orders = [[] for _ in range(stages)]
    for cells in clock_cycles(microbatches, stages):
        for microbatch, stage in cells:
            orders[stage].append(Action(kind="forward", stage=stage, microbatch=microbatch))
    for stage, actions in enumerate(orders):
        forwards = reversed(actions) if in_reverse else iter(actions)
        actions += [Action(kind="backward", stage=stage, microbatch=one.microbatch) for one in list(forwards)]
    return tuple(tuple(actions) for actions in orders)


def one_forward_one_backward(microbatches, stages):
    """Return the order 1F1B: stage s runs n - s forwards, then a backward and a forward in turn.

    So stage s holds at most n - s microbatches, and the last one.

    Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2,
    with the flush of "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.

    Args:
        microbatches: At least 1.
        stages: At least 1; each has a worker.
    """
    orders = []
    for stage in range(stages):
        ahead = stages - stage
        actions = []
        for turn in range(microbatches + ahead):
            if turn >= ahead:
                actions.append(Action(kind="backward", stage=stage, microbatch=turn - ahead))
            if turn < microbatches:
                actions.append(Action(kind="forward", stage=stage, microbatch=turn))
        orders.append(tuple(actions))
    return tuple(orders)


def equal_costs(stages, seconds):
    """Return the costs of identical stages, by stage and kind."""
    return {(stage, kind): cost for stage in range(stages) for kind, cost in seconds.items()}
