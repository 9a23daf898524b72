"""A clock that layers wind themselves, so that nothing hangs on how fast a machine is."""

from types import SimpleNamespace

from probes.memory import accelerators
from probes.pipelines import costs


def wound(monkeypatch):
    """The clock by which layers are timed from now on: it stands still but for what they add to its `now`."""
    clock = SimpleNamespace(now=0.0, calls=0)
    for module in (costs, accelerators):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock
