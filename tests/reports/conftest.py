"""What tests of pictures share."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved while a test runs."""
    saved = []
    save = Figure.savefig

    def watched(figure, *args, **kwargs):
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", watched)
    return saved
