"""What the tests of stores share."""

import pytest

from stores import faults


@pytest.fixture(autouse=True)
def _alone():
    faults.begin()
