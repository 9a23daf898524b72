"""Plans and frontiers: what planning returns.

plan_data.py     a plan as data, and its file
plans.py         its verbs
plan_views.py    a plan as text, as a page and as steps over time
descriptions.py  a candidate as a plan
frontiers.py     peak against time over all budgets
staircases.py    a picture of that
"""
