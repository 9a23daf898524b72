"""Tests that cannot hold on the emulated device, by the reason. `*` stands for anything, as in file names."""

from __future__ import annotations

NOT_HERE: dict[str, tuple[str, ...]] = {}
