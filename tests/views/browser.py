"""A browser without a window that opens a page, runs a script in it and tells what that returns."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="there is no Chromium to open pages in: apt install chromium"
)

_PROBE = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push("refused: " + event.blockedURI));
addEventListener("load", () => setTimeout(async () => {
  let told;
  try { told = await (async () => {SCRIPT})(); } catch (error) { errors.push(String(error.stack)); }
  const place = document.createElement("pre");
  place.id = "told";
  place.textContent = JSON.stringify({ told, errors });
  document.body.replaceChildren(place);
}, 300));
</script>
"""

# What a script may use: the chart, a row by its key, and the pointer over a point of a trace.
_TOOLS = """
const chart = document.querySelector(".figure");
const row = (key) => [...document.querySelectorAll("tbody tr")].find((one) => one.dataset.key === key);
const pause = () => new Promise((done) => setTimeout(done, 200));
const point = async (x, y) => {
  const area = chart.querySelector(".nsewdrag").getBoundingClientRect();
  const { xaxis, yaxis } = chart._fullLayout;
  const clientX = area.left + xaxis.d2p(x), clientY = area.top + yaxis.d2p(y);
  for (const type of ["mouseover", "mousemove"])
    chart.querySelector(".nsewdrag").dispatchEvent(new MouseEvent(type, { clientX, clientY, bubbles: true }));
  await pause();
};
"""


def told_by(page, script, *, dark=False):
    """Open a page, light or dark, and return what the script in it returns; there may be no errors in the page."""
    probe = page.with_name(f"{page.stem}-probe.html")
    text = page.read_text().replace("<head>", "<head>" + _PROBE.replace("SCRIPT", _TOOLS + script), 1)
    probe.write_text(text)
    shown = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--window-size=1280,1600",
            "--virtual-time-budget=20000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={page.parent / 'browser'}",
            "--dump-dom",
            probe.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="told">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert found is not None, shown.stdout[-2000:] + shown.stderr[-2000:]
    answer = json.loads(html.unescape(found[1]))
    assert answer["errors"] == []
    return answer.get("told")
