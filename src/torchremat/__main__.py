"""The door to the command line: `torchremat`, or `python -m torchremat`."""

import sys

try:
    from torchremat.cli.commands import main
except ModuleNotFoundError as error:
    if error.name not in ("rich", "typer"):
        raise
    sys.exit(
        f"The command line needs {error.name}, which is not installed. Install it with: pip install 'torchremat[cli]'"
    )

if __name__ == "__main__":
    main()
