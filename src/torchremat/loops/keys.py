"""The owner of the tensors that are recomputed now."""

from __future__ import annotations

from torchremat._compat.autograd import current_graph_task
from torchremat.regions.sessions import active_session, open_sessions
from torchremat.regions.slots import Key


def current_key() -> Key | None:
    """Return the session or the backward that runs now, None outside of any."""
    session = active_session() if open_sessions else None
    if session is not None:
        return session
    task = current_graph_task()
    return None if task == -1 else task
