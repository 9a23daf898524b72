"""Actions from their text, as `torchremat.schedules.actions.text` writes it."""

import re

from torchremat.schedules.actions import BackwardAction, ForwardAction, HoldAction, RecomputeAction

WORDS = {
    r"F(\d+)(?::(\d+))?": lambda stage, option: ForwardAction(int(stage), option and int(option)),
    r"H(\d+)-(\d+)": lambda first, last: HoldAction(int(first), int(last)),
    r"R(\d+)(?::(\d+)(!)?)?": lambda stage, option, stops: RecomputeAction(
        int(stage), option and int(option), stops=bool(stops)
    ),
    r"B(\d+)": lambda stage: BackwardAction(int(stage)),
}


def parse(line):
    return tuple(
        next(make(*found.groups()) for word, make in WORDS.items() if (found := re.fullmatch(word, one)))
        for one in line.split()
    )
