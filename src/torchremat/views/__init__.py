"""Views outside of Python: pages for a browser, and traces for Perfetto.

Views know no plans and no measurements; plans and measurements describe their content as a `Page` or as a `Step`.

page.py             a page: facts, charts, tables
steps.py            a step over time: the bytes at each point in time, and the running code
charts.py           the common part of the plotly.js figures, and the reason for plotly
step_chart.py       a step
staircase_chart.py  peak against time
tree_chart.py       bytes by module
html.py             pages as HTML, with page.html, page.css and page.js
trace.py            steps as events of the trace format
viewed.py           objects with views: the two above as methods
"""
