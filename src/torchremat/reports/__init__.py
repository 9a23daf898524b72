"""Pictures of plans and measurements.

plots.py  measured steps, steps of pipelines, frontiers
bars.py   the progress bar of planning, to pass by hand
"""
