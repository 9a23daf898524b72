"""Tests that cannot hold on the emulated device, by the reason. `*` stands for anything, as in file names."""

from __future__ import annotations

# Races that a test may have, by a pattern of their text.
KNOWN_RACES = {
    r"^the write of memory .* does not wait for the read by copy_ .*: the memory was freed": (
        "a handle of `Host` that is dropped while its copy is pending frees the source at once; nobody reads that copy"
    ),
}

NOT_HERE: dict[str, tuple[str, ...]] = {}
