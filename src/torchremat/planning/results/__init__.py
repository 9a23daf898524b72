"""Plans and frontiers: what planning returns.

plan_data.py     a plan as data
plans.py         its verbs and views
files.py         its file
descriptions.py  a candidate as a plan
printing.py      a plan as text
plan_page.py     a plan as a page
frontiers.py     peak against time over all budgets
staircases.py    a picture of that
"""
