"""What tests of plans share."""

import pytest

from planning.steps import with_declared_speed


@pytest.fixture(scope="module")
def declared_speed():
    """Stores are as fast as they declare, which no measurement changes."""
    with with_declared_speed():
        yield
