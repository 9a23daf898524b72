"""What people look at outside of Python: pages for a browser, and traces for Perfetto.

Knows no plans and no measurements; these say what there is to see, as a `Page` or as a `Step`.

page.py             a page: facts, charts, tables
steps.py            a step over time: the bytes at each moment, and what runs
charts.py           what the figures of plotly.js have in common, and why it is plotly
step_chart.py       a step
staircase_chart.py  peak against time
tree_chart.py       bytes by module
html.py             pages as HTML, with page.html, page.css and page.js
trace.py            steps as events of the trace format
viewed.py           what an object has that can be looked at: the two above as methods
"""
