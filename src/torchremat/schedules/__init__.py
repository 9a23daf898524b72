"""Schedules: the order of forward, recompute and backward as data, one interpreter, and the solvers over it."""
