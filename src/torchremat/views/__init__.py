"""Views outside of Python: pages for a browser, and traces for Perfetto.

Views know no plans and no measurements; plans and measurements describe their content as a `Page` or as a `Step`.

page.py        a page: facts, charts, tables
steps.py       a step over time: the bytes at each point in time, and the running code
charts.py      the common part of the plotly.js figures; peak against time; bytes by module
step_chart.py  a step
pictures.py    what all pictures by matplotlib share
viewed.py      objects with views: pages as HTML, with page.html, page.css and page.js, and steps as a trace
"""
