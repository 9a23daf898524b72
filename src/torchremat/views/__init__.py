"""What people look at outside of Python: pages for a browser, and traces for Perfetto.

Knows no plans and no measurements; these say what there is to see, as a `Page` or as a `Step`.

steps.py     a step over time: the bytes at each moment, and what runs
charts.py    steps, staircases and trees as figures of plotly.js
page.py      a page: facts, charts, tables
html.py      pages as HTML, with page.html, page.css and page.js
trace.py     steps as events of the trace format
"""
