"""The progress bar of planning, to pass by hand; `plan`, `fit` and `frontier` show it by themselves."""

from torchremat.planning.bars import progress_bar

__all__ = ["progress_bar"]
