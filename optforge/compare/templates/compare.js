"use strict";
/* Plot, filters, sorting, and the chosen runs side by side. All figures come from the page's own data; nothing is fetched. */

const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SHAPES = ["circle", "square", "triangle", "diamond", "down", "cross"];
const MAX_PICKED = 6, COLOURS = 8, LABELS = 14;
const metric = Object.fromEntries(D.metrics.map((m) => [m.key, m]));
const state = { x: D.axes[0], y: D.axes[1], colour: "", log: { x: false, y: false }, text: "", facets: {}, kinds: { measured: true, predicted: true }, front: false, picked: [] };

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "polyline", "text", "title"].includes(name);
  const found = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children.filter((child) => child !== null));
  return found;
}

/* Which rows are shown. Measured and predicted rows have fronts of their own. */

const cost = (value, key) => (metric[key].better === "higher" ? -value : value);
const has = (row, key) => row.values[key] !== undefined;

function front(rows, x, y) {
  const points = rows.filter((row) => has(row, x) && has(row, y)).map((row) => ({ row, a: cost(row.values[x][0], x), b: cost(row.values[y][0], y) }));
  points.sort((p, q) => p.a - q.a || p.b - q.b);
  const found = [];
  for (const point of points) {
    const last = found[found.length - 1];
    if (!last || point.b < last.b || (point.a === last.a && point.b === last.b)) found.push(point);
  }
  return found.map((point) => point.row);
}

function matching() {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  return D.rows.filter((row) => state.kinds[row.kind]
    && D.facets.every((key) => !state.facets[key] || row.facets[key] === state.facets[key])
    && words.every((word) => (row.name + " " + row.where + " " + row.verdict).toLowerCase().includes(word)));
}

function fronts(rows) {
  return ["measured", "predicted"].map((kind) => front(rows.filter((row) => row.kind === kind), state.x, state.y));
}

function visible() {
  const rows = matching();
  if (!state.front) return rows;
  const kept = new Set(fronts(rows).flat());
  return rows.filter((row) => kept.has(row));
}

/* Axes. */

const SCALES = { bytes: [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]], per_s: [["", 1], ["k", 1e3], ["M", 1e6]], latency_ms: [["us", 1e-3], ["ms", 1], ["s", 1e3]] };

function tickText(value, unit, step) {
  if (unit === "share") return `${value > 0 ? "+" : ""}${(value * 100).toFixed(Math.max(0, -Math.floor(Math.log10(step * 100) + 1e-9)))}%`;
  const scale = SCALES[unit];
  if (!scale) return String(+value.toPrecision(3));
  const [name, size] = scale.filter(([, size]) => Math.abs(value) >= size).pop() || scale[unit === "latency_ms" ? 1 : 0];
  return value === 0 ? "0" : `${+(value / size).toPrecision(4)}${name ? " " + name : ""}`;
}

function axis(values, from, to, unit, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    const a = Math.log10(low) - 0.04, b = Math.log10(high) + 0.04, span = Math.max(b - a, 0.2), middle = (a + b) / 2;
    const lo = middle - span / 2, hi = middle + span / 2, ticks = [];
    for (let e = Math.floor(lo); e <= hi; e++) for (const m of span > 2.5 ? [1] : span > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7]) {
      const at = Math.log10(m * 10 ** e);
      if (at >= lo && at <= hi) ticks.push([m * 10 ** e, tickText(m * 10 ** e, unit, m * 10 ** e)]);
    }
    return { at: (v) => from + (to - from) * (Math.log10(v) - lo) / (hi - lo), ticks };
  }
  const pad = (high - low || Math.abs(high) || 1) * 0.08;
  low = low >= 0 && low - pad < 0 ? -pad * 0.35 : low - pad; high += pad;
  const raw = (high - low) / 6, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) ticks.push([v, tickText(Math.abs(v) < step * 1e-6 ? 0 : v, unit, step)]);
  return { at: (v) => from + (to - from) * (v - low) / (high - low), ticks };
}

/* Colours and shapes: one category each, so that they can be told apart without colour too. */

function categories() {
  const counts = new Map();
  for (const row of D.rows) counts.set(row.facets[state.colour], (counts.get(row.facets[state.colour]) || 0) + 1);
  return [...counts.keys()].sort((a, b) => String(a).localeCompare(String(b), undefined, { numeric: true }));
}

function styleOf(row, known) {
  const index = state.colour ? known.indexOf(row.facets[state.colour]) : 0;
  return index < COLOURS ? { colour: `c${index}`, shape: SHAPES[index % SHAPES.length] } : { colour: "cx", shape: "circle" };
}

function outline(shape, x, y, r) {
  const poly = (...points) => `M${points.map(([a, b]) => `${(x + a * r).toFixed(1)} ${(y + b * r).toFixed(1)}`).join("L")}Z`;
  switch (shape) {
    case "square": return poly([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]);
    case "triangle": return poly([0, -1.2], [1.1, 0.8], [-1.1, 0.8]);
    case "down": return poly([0, 1.2], [1.1, -0.8], [-1.1, -0.8]);
    case "diamond": return poly([0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]);
    case "cross": return poly([-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]);
    default: return `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
  }
}

/* The plot. */

function draw(rows) {
  const box = $("plot"), width = Math.max(320, box.clientWidth || 900), height = Math.min(560, Math.max(320, width * 0.5));
  const { x, y } = state, shown = rows.filter((row) => has(row, x) && has(row, y));
  box.replaceChildren();
  $("missing").textContent = "";
  if (!shown.length) { box.append(element("p", { class: "quiet" }, "No shown run has both figures.")); $("legend").replaceChildren(); return; }
  const ends = (key) => shown.flatMap((row) => row.values[key].slice(0, 3).filter((value) => value !== null));
  const log = (name) => state.log[name] && Math.min(...ends(state[name])) > 0;
  const across = axis(ends(x), 74, width - 22, metric[x].unit, log("x")), up = axis(ends(y), height - 52, 18, metric[y].unit, log("y"));
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${metric[y].title} over ${metric[x].title} of ${shown.length} runs; the tables below hold the figures` });
  for (const [value, text] of across.ticks) svg.append(element("line", { class: "grid", x1: across.at(value), x2: across.at(value), y1: 18, y2: height - 52 }), element("text", { x: across.at(value), y: height - 36, "text-anchor": "middle" }, text));
  for (const [value, text] of up.ticks) svg.append(element("line", { class: "grid", x1: 74, x2: width - 22, y1: up.at(value), y2: up.at(value) }), element("text", { x: 66, y: up.at(value) + 4, "text-anchor": "end" }, text));
  const better = (key) => (metric[key].better === "higher" ? "more is better" : "less is better");
  svg.append(element("text", { class: "axis", x: (74 + width - 22) / 2, y: height - 12, "text-anchor": "middle" }, `${metric[x].title} (${better(x)})`));
  svg.append(element("text", { class: "axis", transform: `translate(15 ${height / 2 - 17}) rotate(-90)`, "text-anchor": "middle" }, `${metric[y].title} (${better(y)})`));
  const edges = fronts(shown), onFront = new Set(edges.flat()), known = categories();
  edges.forEach((edge, index) => { if (edge.length > 1) svg.append(element("path", { class: `edge${index ? " predicted" : ""}`, d: stairs(edge.map((row) => [across.at(row.values[x][0]), up.at(row.values[y][0])])) })); });
  const crowded = shown.length > 60, placed = [];
  for (const row of [...shown].sort((a, b) => onFront.has(a) - onFront.has(b))) {
    const px = across.at(row.values[x][0]), py = up.at(row.values[y][0]), style = styleOf(row, known), front = onFront.has(row);
    if (front || !crowded) whiskers(svg, row, across, up, style.colour);
    const classes = ["mark", style.colour, row.kind === "predicted" ? "predicted" : "", front ? "" : "behind", state.picked.includes(row) ? "picked" : ""];
    const mark = element("path", { class: classes.filter(Boolean).join(" "), d: outline(style.shape, px, py, crowded && !front ? 4.6 : 6.2), "data-row": D.rows.indexOf(row) });
    mark.addEventListener("pointerenter", () => tip(row, px, py, width));
    mark.addEventListener("pointerleave", () => box.querySelector(".tip")?.remove());
    mark.addEventListener("click", () => pick(row));
    svg.append(mark);
    placed.push([px - 7, py - 7, px + 7, py + 7]);
  }
  const wanted = shown.length <= LABELS ? shown : [...edges.flat()].slice(0, LABELS);
  for (const row of wanted) label(svg, row, across.at(row.values[x][0]), up.at(row.values[y][0]), placed, width, height);
  box.append(svg);
  legend(shown, known);
  const lacking = rows.length - shown.length;
  $("missing").textContent = lacking ? `${lacking} of the ${rows.length} shown rows ${lacking === 1 ? "lacks" : "lack"} one of the two figures and ${lacking === 1 ? "is" : "are"} not in the plot.` : "";
}

function stairs(points) {
  const path = [`M${points[0][0].toFixed(1)} ${points[0][1].toFixed(1)}`];
  for (let index = 1; index < points.length; index++) path.push(`H${points[index][0].toFixed(1)}V${points[index][1].toFixed(1)}`);
  return path.join("");
}

function whiskers(svg, row, across, up, colour) {
  const [vx, lx, hx] = row.values[state.x], [vy, ly, hy] = row.values[state.y];
  if (lx !== null) svg.append(element("line", { class: `whisker ${colour}`, x1: across.at(lx), x2: across.at(hx), y1: up.at(vy), y2: up.at(vy) }));
  if (ly !== null) svg.append(element("line", { class: `whisker ${colour}`, x1: across.at(vx), x2: across.at(vx), y1: up.at(ly), y2: up.at(hy) }));
}

function label(svg, row, px, py, placed, width, height) {
  const text = row.name.length > 44 ? row.name.slice(0, 42) + "..." : row.name, size = text.length * 6.6;
  const places = [[px + 9, py - 9, "start"], [px - 9, py - 9, "end"], [px + 11, py + 4, "start"], [px - 11, py + 4, "end"], [px, py - 13, "middle"], [px, py + 21, "middle"]];
  for (const [tx, ty, anchor] of places) {
    const left = anchor === "start" ? tx : anchor === "end" ? tx - size : tx - size / 2, area = [left, ty - 11, left + size, ty + 3];
    const free = area[0] > 70 && area[2] < width - 4 && area[1] > 4 && area[3] < height - 50
      && placed.every(([a, b, c, d]) => area[2] < a || area[0] > c || area[3] < b || area[1] > d || (a < px && c > px && b < py && d > py && d - b < 15));
    if (free) { placed.push(area); svg.append(element("text", { class: "name", x: tx, y: ty, "text-anchor": anchor }, text)); return; }
  }
}

function tip(row, px, py, width) {
  const list = element("dl");
  for (const m of D.metrics) if (has(row, m.key)) list.append(element("dt", {}, m.title), element("dd", {}, row.values[m.key][3]));
  if (row.ratio) list.append(element("dt", {}, "vs reference"), element("dd", {}, row.ratio));
  const box = element("div", { class: "tip" }, element("b", {}, row.name), element("span", { class: "quiet" }, row.where + (row.verdict ? `, ${row.verdict}` : "")), list);
  box.style.top = `${py + 12}px`;
  if (px > width / 2) box.style.right = `${width - px + 12}px`; else box.style.left = `${px + 12}px`;
  $("plot").append(box);
}

function legend(shown, known) {
  const present = new Set(shown.map((row) => row.facets[state.colour])), entries = [];
  const item = (style, text, predicted) => {
    const svg = element("svg", { viewBox: "0 0 16 16" }, element("path", { class: `mark ${style.colour}${predicted ? " predicted" : ""}`, d: outline(style.shape, 8, 8, 5) }));
    return element("span", {}, svg, text);
  };
  if (state.colour) known.filter((value) => present.has(value)).slice(0, 20).forEach((value) => {
    const rows = shown.filter((row) => row.facets[state.colour] === value);
    entries.push(item(styleOf(rows[0], known), `${value} (${rows.length})`, rows.every((row) => row.kind === "predicted")));
  });
  if (shown.some((row) => row.kind === "predicted")) entries.push(item({ colour: "cx", shape: "circle" }, "hollow: predicted", true));
  $("legend").replaceChildren(...entries);
}

/* The chosen runs: waterfalls and settings. */

function chosen(rows) {
  const picked = state.picked.filter((row) => rows.includes(row));
  if (picked.length) return picked;
  const [measured, predicted] = fronts(rows), some = [...measured, ...rows.filter((row) => row.kind === "measured" && !measured.includes(row))];
  return (some.length ? some : predicted).slice(0, 4);
}

function pick(row) {
  state.picked = state.picked.includes(row) ? state.picked.filter((other) => other !== row) : [...state.picked, row].slice(-MAX_PICKED);
  update();
}

function falls(rows) {
  const top = (kind) => Math.max(...rows.filter((row) => row.kind === kind).flatMap((row) => row.steps.map((step) => step.ms || 0)), 1e-12) * 1.04;
  const tops = { measured: top("measured"), predicted: top("predicted") };
  $("falls").replaceChildren(...rows.map((row) => {
    const box = element("div", { class: row.kind }, element("h3", {}, row.name), element("p", { class: "quiet" }, `${row.where}${row.ratio && row.ratio !== "n/a" ? `; ${row.ratio} vs reference` : ""}`));
    let before = null;
    for (const step of row.steps) {
      const track = element("div", { class: `track ${before !== null && step.ms > before ? "bad" : "good"}`, "aria-hidden": "true" });
      const percent = (value) => `${(100 * value / tops[row.kind]).toFixed(2)}%`;
      if (step.ms) {
        const bar = element("span", { class: "time" }); bar.style.width = percent(step.ms); track.append(bar);
        if (before !== null && before !== step.ms) {
          const change = element("span", { class: step.ms < before ? "saved" : "change" });
          change.style.left = percent(Math.min(step.ms, before)); change.style.width = percent(Math.abs(step.ms - before)); track.append(change);
        }
        if (step.kept) before = step.ms;
      }
      const name = element("div", { title: step.use }, step.name), figure = element("div", {}, step.text, element("br"), element("small", {}, step.kept ? step.ratio : "dropped"));
      box.append(element("div", { class: `row${step.kept ? "" : " dropped"}` }, name, track, figure));
    }
    return box;
  }));
}

function settings(rows) {
  if (!$("settings")) return;
  const head = element("tr", {}, element("th", {}, "Setting"), ...rows.map((row) => element("th", {}, row.name + (row.kind === "predicted" ? " (predicted)" : ""))));
  const lines = [];
  D.settings.forEach((key, index) => {
    const values = rows.map((row) => row.settings[index]), differs = new Set(values).size > 1;
    if (values.some((value) => value !== D.absent)) lines.push([differs, element("tr", {}, element("td", {}, key), ...values.map((value) => element("td", differs ? { class: "differs" } : {}, value)))]);
  });
  lines.sort((a, b) => b[0] - a[0]);
  $("settings").replaceChildren(element("table", { class: "compare" }, element("thead", {}, head), element("tbody", {}, ...lines.map(([, line]) => line))));
}

/* The tables, and what the reader can change. */

function tables(rows) {
  const shown = new Set(rows), picked = new Set(state.picked);
  for (const line of document.querySelectorAll("tr[data-row]")) {
    const row = D.rows[+line.dataset.row];
    line.hidden = !shown.has(row);
    line.classList.toggle("picked", picked.has(row));
    line.querySelector("input").checked = picked.has(row);
  }
}

function sortBy(button) {
  const head = button.closest("th"), table = head.closest("table"), column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (line) => { const cell = line.children[column], value = cell.dataset.value ?? cell.textContent; return value === "" || value === "n/a" ? null : value; };
  const order = (a, b) => {
    const first = key(a), second = key(b);
    if (first === null || second === null) return (first === null) - (second === null);
    const numbers = parseFloat(first) - parseFloat(second);
    return (Number.isNaN(numbers) ? first.localeCompare(second, undefined, { numeric: true }) : numbers) * (down ? -1 : 1);
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
}

function update() {
  const rows = visible(), side = chosen(rows);
  draw(rows); tables(rows); falls(side); settings(side);
  if ($("count")) $("count").textContent = `${rows.length} of ${D.rows.length} shown`;
}

function options(select, values, value, change) {
  select.replaceChildren(...values.map(([key, text]) => element("option", { value: key }, text)));
  select.value = value;
  select.addEventListener("change", () => { change(select.value); update(); });
}

function tick(text, checked, change) {
  const input = element("input", { type: "checkbox" });
  input.checked = checked;
  input.addEventListener("change", () => { change(input.checked); update(); });
  return element("label", { class: "tick" }, input, text);
}

/* A figure that spans a factor of thirty is drawn on a logarithmic axis, until the reader says otherwise. */
function wide(name) {
  const both = D.rows.filter((row) => has(row, state.x) && has(row, state.y)).map((row) => row.values[state[name]][0]);
  $(`log${name}`).checked = state.log[name] = both.length > 0 && Math.min(...both) > 0 && Math.max(...both) / Math.min(...both) > 30;
}

function controls() {
  const bar = $("facets"), search = element("input", { type: "search", placeholder: "name, device, verdict", id: "search" });
  search.addEventListener("input", () => { state.text = search.value; update(); });
  if (D.rows.length > 6) bar.append(element("label", {}, "Search", search));
  for (const key of D.facets) {
    const select = element("select", { "data-facet": key }), values = [...new Set(D.rows.map((row) => row.facets[key]))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    options(select, [["", "all"], ...values.map((value) => [value, value])], "", (value) => { state.facets[key] = value; });
    bar.append(element("label", {}, key, select));
  }
  for (const kind of ["measured", "predicted"]) if (D.rows.some((row) => row.kind !== kind) && D.rows.some((row) => row.kind === kind)) bar.append(tick(kind, true, (on) => { state.kinds[kind] = on; }));
  bar.append(tick("only the front", false, (on) => { state.front = on; }), element("output", { id: "count" }));
  const named = D.metrics.map((m) => [m.key, m.title]);
  options($("x"), named, state.x, (value) => { state.x = value; wide("x"); });
  options($("y"), named, state.y, (value) => { state.y = value; wide("y"); });
  state.colour = D.facets.includes("recipe") ? "recipe" : D.facets[0] || "";
  options($("colour"), [["", "one colour"], ...D.facets.map((key) => [key, key])], state.colour, (value) => { state.colour = value; });
  for (const name of ["x", "y"]) {
    $(`log${name}`).addEventListener("change", () => { state.log[name] = $(`log${name}`).checked; update(); });
    wide(name);
  }
  for (const button of document.querySelectorAll("[data-sort]")) button.addEventListener("click", () => sortBy(button));
  for (const line of document.querySelectorAll("tr[data-row]")) line.querySelector("input").addEventListener("change", () => pick(D.rows[+line.dataset.row]));
}

document.documentElement.classList.add("js");
if (D.rows.length) {
  for (const key of ["x", "y"]) if (!metric[state[key]]) state[key] = D.metrics[0].key;
  controls();
  update();
  new ResizeObserver(() => draw(visible())).observe($("filters"));
}
