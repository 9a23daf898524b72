"""Build the emulated device and say where it is: `python -m emulator`, with `tests` on Python's path."""

import sys

from emulator.building import EmulatorError, build

try:
    print(build())
except EmulatorError as error:
    sys.exit(str(error))
