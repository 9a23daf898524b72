// What links the charts of plotly.js and the tables of the page: colours, sorting, and what is pointed at.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const figures = [...document.querySelectorAll(".figure")];
  const rows = [...document.querySelectorAll("tbody tr")];
  const rowsByKey = new Map();
  for (const row of rows) {
    if (!row.dataset.key) continue;
    rowsByKey.set(row.dataset.key, [...(rowsByKey.get(row.dataset.key) || []), row]);
    row.classList.add("linked");
  }
  let held = null; // the key that was clicked
  let shown = null; // the key that is marked

  // "@name" is the colour of that name, light or dark.
  const painted = (value) => {
    const style = getComputedStyle(document.documentElement);
    const walk = (one) => {
      if (typeof one === "string" && one[0] === "@") return style.getPropertyValue("--" + one.slice(1)).trim();
      if (Array.isArray(one)) return one.map(walk);
      if (one && typeof one === "object") return Object.fromEntries(Object.entries(one).map(([k, v]) => [k, walk(v)]));
      return one;
    };
    return walk(value);
  };

  const marksOf = (chart, key) =>
    (key === null ? [] : chart.spans[key] || []).map(([x0, x1]) => ({
      type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1,
      fillcolor: "@recompute", opacity: 0.18, line: { width: x0 === x1 ? 2 : 0.5, color: "@recompute" }, layer: "above",
    }));

  const draw = () => {
    figures.forEach((place) => {
      const chart = charts[Number(place.dataset.chart)];
      const range = place.layout && place.layout.xaxis ? place.layout.xaxis.range : null; // as it was zoomed
      const figure = painted({ data: chart.figure.data, layout: { ...chart.figure.layout, shapes: marksOf(chart, shown) } });
      if (range) Object.assign(figure.layout.xaxis, { range, autorange: false });
      Plotly.react(place, figure.data, figure.layout, {
        displaylogo: false, responsive: true, displayModeBar: chart.figure.data[0].type !== "treemap",
        modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
      });
    });
  };

  const mark = (key) => {
    if (key === shown) return;
    for (const row of rowsByKey.get(shown) || []) row.classList.remove("marked");
    shown = key;
    for (const row of rowsByKey.get(shown) || []) row.classList.add("marked");
    figures.forEach((place) => {
      const chart = charts[Number(place.dataset.chart)];
      if (place.data[0].type !== "treemap") Plotly.relayout(place, { shapes: painted(marksOf(chart, shown)) });
    });
  };

  const hold = (key) => {
    for (const row of rowsByKey.get(held) || []) row.classList.remove("held");
    held = key === held ? null : key;
    for (const row of rowsByKey.get(held) || []) row.classList.add("held");
    mark(held);
  };

  const keyOf = (event) => {
    const found = event.points && event.points[0].customdata;
    const key = found && found[found.length - 1];
    return key && rowsByKey.has(key) ? key : null;
  };

  const show = (row) => {
    const box = row.closest(".scroll");
    const head = box.querySelector("thead").offsetHeight;
    if (row.offsetTop - head < box.scrollTop || row.offsetTop > box.scrollTop + box.clientHeight - row.offsetHeight)
      box.scrollTop = row.offsetTop - box.clientHeight / 2;
  };

  draw();
  figures.forEach((place) => {
    place.on("plotly_hover", (event) => {
      const key = keyOf(event);
      if (held === null && key !== null) { mark(key); show(rowsByKey.get(key)[0]); }
    });
    place.on("plotly_unhover", () => { if (held === null) mark(null); });
    place.on("plotly_click", (event) => {
      const key = keyOf(event);
      if (key !== null) { hold(key); show(rowsByKey.get(key)[0]); }
    });
  });
  for (const row of rows) {
    row.addEventListener("mouseenter", () => { if (held === null) mark(row.dataset.key || null); });
    row.addEventListener("mouseleave", () => { if (held === null) mark(null); });
    row.addEventListener("click", () => { if (row.dataset.key) hold(row.dataset.key); });
  }

  // A heading sorts by its column: numbers the largest first, text from A to Z, then the other way round.
  for (const head of document.querySelectorAll("th")) {
    head.querySelector("button").addEventListener("click", () => {
      const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of table.querySelectorAll("th")) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const compare = (a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        if ("order" in x.dataset || "order" in y.dataset)
          return sign * (Number(x.dataset.order ?? -Infinity) - Number(y.dataset.order ?? -Infinity));
        return sign * x.textContent.localeCompare(y.textContent, undefined, { numeric: true });
      };
      body.append(...[...body.rows].sort(compare));
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
