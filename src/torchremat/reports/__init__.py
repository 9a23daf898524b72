"""Tables and pictures of plans and measurements.

frontier_tables.py  frontiers, for the command line
plots.py            measured steps, steps of pipelines, frontiers
bars.py             the progress bar of planning, to pass by hand
"""
