"""What the tests of stores share."""

import os

import pytest

from stores import faults
from stores.faults import Calls


@pytest.fixture(autouse=True)
def _alone():
    faults.begin()


@pytest.fixture
def writes(monkeypatch):
    calls = Calls(os.pwrite)
    monkeypatch.setattr(os, "pwrite", calls)
    yield calls
    calls.gate.set()


@pytest.fixture
def reads(monkeypatch):
    calls = Calls(os.preadv)
    monkeypatch.setattr(os, "preadv", calls)
    yield calls
    calls.gate.set()
