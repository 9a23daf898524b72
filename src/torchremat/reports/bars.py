"""The bar of planning, for whoever passes it by hand; `plan`, `fit` and `frontier` show it by themselves."""

from torchremat.planning.bars import progress_bar

__all__ = ["progress_bar"]
