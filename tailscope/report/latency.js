// Distributions and time, exact where nothing is narrowed, else of the sample.

const OVER_TIME = [0.99, 0.95, 0.9, 0.5];
const LEAST_BEYOND = 10;
const MOST_DOTS = 2500;

const narrowed = () => page.state.klass !== null || page.state.tenant !== null || page.state.instance !== null || page.state.from > 0 || page.state.to < 1000;
// What the exact numbers cannot tell: they know of classes.
const needsSample = () => page.state.tenant !== null || page.state.instance !== null || page.state.from > 0 || page.state.to < 1000;

function timeRange() {
  const span = page.data.latency.span;
  return [(page.state.from / 1000) * span, (page.state.to / 1000) * span];
}

// Places in the sample that are chosen.
function chosen() {
  const s = page.data.latency.sample;
  const { klass, tenant, instance } = page.state;
  const [low, high] = timeRange();
  const places = [];
  for (let i = 0; i < s.klass.length; i++) {
    if (klass !== null && s.klass[i] !== klass) continue;
    if (tenant !== null && s.tenant[i] !== tenant) continue;
    if (instance !== null && s.instance[i] !== instance) continue;
    if (s.at[i] < low || s.at[i] > high) continue;
    places.push(i);
  }
  return places;
}

const column = (metric) => page.data.latency.sample[metric.toLowerCase()];

// Values of a class with their weights, ascending.
function weighted(places, metric, klass) {
  const values = column(metric);
  const { klass: classes, weight } = page.data.latency.sample;
  const found = [];
  for (const i of places) if (classes[i] === klass && values[i] !== null) found.push([values[i], weight[i]]);
  return found.sort((a, b) => a[0] - b[0]);
}

// A quantile of weighted values, null where too few lie beyond it.
function quantile(sorted, q) {
  const total = sorted.reduce((sum, [, w]) => sum + w, 0);
  if (total * (1 - q) < LEAST_BEYOND) return null;
  let beyond = total * (1 - q);
  let i = sorted.length;
  while (i > 0 && beyond > 0) beyond -= sorted[--i][1];
  return sorted.length - i >= Math.min(LEAST_BEYOND, sorted.length) ? sorted[i][0] : null;
}

function curveOf(sorted) {
  const total = sorted.reduce((sum, [, w]) => sum + w, 0);
  const xs = [];
  const ys = [];
  let left = total;
  const every = Math.max(1, Math.floor(sorted.length / 400));
  sorted.forEach(([v, w], i) => {
    left -= w;
    // The slowest are all drawn, of the others some.
    if (i % every === 0 || i > sorted.length - 200) {
      xs.push(v);
      ys.push(Math.max(left, w * 0.5) / total);
    }
  });
  return { xs, ys, n: total };
}

function drawDistribution() {
  const lat = page.data.latency;
  const metric = value("dist-metric");
  const c = colours();
  const exact = !needsSample() || metric === "ITL";
  const places = exact ? null : chosen();
  const traces = [];
  let low = Infinity;
  let high = 0;
  lat.classes.forEach((name, k) => {
    if (page.state.klass !== null && page.state.klass !== k) return;
    let curve;
    if (exact) {
      const told = lat.curves[metric]?.[name];
      if (!told) return;
      curve = { xs: told.s, ys: told.q.map((q) => Math.max(1 - q, 0.5 / told.n)), n: told.n };
    } else {
      const sorted = weighted(places, metric, k);
      if (!sorted.length) return;
      curve = curveOf(sorted);
    }
    low = Math.min(low, curve.xs.find((x) => x > 0) ?? Infinity);
    high = Math.max(high, curve.xs.at(-1));
    traces.push({
      type: "scatter",
      mode: "lines",
      x: curve.xs,
      y: curve.ys,
      name: `${brief(name)} (${whole(curve.n)})`,
      line: { color: c.series[k % 8], dash: DASHES[k % 8], width: 2.2, shape: curve.n < 200 ? "hv" : "linear" },
      showlegend: true,
      text: curve.xs.map(seconds),
      hovertemplate: "%{y:.3g} take longer than %{text}<extra>" + brief(name) + "</extra>",
    });
  });
  if (!traces.length) return null;
  const shares = [1, 0.5, 0.1, 0.05, 0.01, 1e-3, 1e-4, 1e-5];
  const lowest = Math.min(...traces.flatMap((t) => t.y));
  return {
    data: traces,
    layout: layout({
      xaxis: secondsAxis(low, high, { title: { text: metric } }),
      yaxis: { type: "log", range: [Math.log10(lowest * 0.8), 0.04], tickvals: shares, ticktext: ["all", "p50", "p90", "p95", "p99", "p99.9", "p99.99", "p99.999"], title: { text: "take longer (log)" } },
      hovermode: "closest",
    }),
  };
}

function windows() {
  const c = colours();
  const [t0, t1] = [page.data.latency.first_ms, page.data.latency.first_ms + page.data.latency.span * 1000];
  const shapes = [];
  const annotations = [];
  const shown = page.data.findings.filter((f) => f.window && f.window[1] > t0 && f.window[0] < t1 && f.window[1] - f.window[0] < 0.95 * (t1 - t0)).slice(0, 6);
  shown.forEach((f, i) => {
    shapes.push({ type: "rect", xref: "x", yref: "paper", x0: f.window[0], x1: f.window[1], y0: 0, y1: 1, fillcolor: c.of("--window"), line: { width: 0 }, layer: "below" });
    annotations.push({ x: f.window[0], y: 1 - 0.07 * i, xref: "x", yref: "paper", text: `finding ${f.number}`, showarrow: false, xanchor: "left", yanchor: "top", font: { size: 11, color: c.ink }, bgcolor: c.of("--page"), opacity: 0.85, borderpad: 1 });
  });
  return { shapes, annotations };
}

function binsOf(lat, metric) {
  if (!needsSample()) {
    const rows = lat.times[metric];
    return lat.classes.map((_, k) => {
      const found = [];
      rows.klass.forEach((of, i) => {
        if (of === k) found.push({ bin: rows.bin[i], n: rows.n[i], q: OVER_TIME.map((q) => rows[`p${Math.round(q * 100)}`][i]) });
      });
      return found;
    });
  }
  const places = chosen();
  const s = lat.sample;
  return lat.classes.map((_, k) => {
    const by = new Map();
    for (const i of places) {
      if (s.klass[i] !== k || column(metric)[i] === null) continue;
      const bin = Math.floor(s.at[i] / lat.bin);
      if (!by.has(bin)) by.set(bin, []);
      by.get(bin).push([column(metric)[i], s.weight[i]]);
    }
    return [...by.entries()]
      .sort((a, b) => a[0] - b[0])
      .map(([bin, values]) => {
        values.sort((a, b) => a[0] - b[0]);
        return { bin, n: values.reduce((sum, [, w]) => sum + w, 0), q: OVER_TIME.map((q) => quantile(values, q)) };
      });
  });
}

function drawTimes() {
  const lat = page.data.latency;
  const metric = value("times-metric");
  const c = colours();
  const bins = binsOf(lat, metric);
  const places = chosen();
  const every = Math.max(1, Math.ceil(places.length / MOST_DOTS));
  const s = lat.sample;
  const data = [];
  const lines = [];
  const many = places.length > 1000;
  let low = Infinity;
  let high = 0;
  lat.classes.forEach((name, k) => {
    if (page.state.klass !== null && page.state.klass !== k) return;
    const xs = [];
    const ys = [];
    places.forEach((i, n) => {
      const v = column(metric)[i];
      // The slowest stand for themselves, and are all shown.
      if (s.klass[i] !== k || !v || (n % every && !(s.weight[i] === 1 && lat.sampled < lat.n))) return;
      xs.push(lat.first_ms + s.at[i] * 1000);
      ys.push(v);
      low = Math.min(low, v);
      high = Math.max(high, v);
    });
    if (xs.length)
      data.push({ type: "scatter", mode: "markers", x: xs, y: ys, text: ys.map(seconds), name: brief(name), legendgroup: String(k), showlegend: false, marker: { color: c.series[k % 8], symbol: SYMBOLS[k % 8], size: many ? 4 : 5, opacity: many ? 0.22 : 0.45 }, hovertemplate: "%{text}<extra>" + brief(name) + " request</extra>" });
    const which = OVER_TIME.findIndex((_, j) => bins[k].filter((b) => b.q[j] !== null).length >= Math.max(1, bins[k].length / 3));
    if (which < 0) return;
    const told = bins[k].filter((b) => b.q[which] !== null);
    const label = `p${Math.round(OVER_TIME[which] * 100)}`;
    // No line over time that nobody measured.
    const drawn = told.flatMap((b, i) => (i && b.bin - told[i - 1].bin > 1 ? [null, b] : [b]));
    lines.push({
      type: "scatter",
      mode: told.length > 1 ? "lines+markers" : "markers",
      x: drawn.map((b) => (b === null ? null : lat.first_ms + (b.bin + 0.5) * lat.bin * 1000)),
      y: drawn.map((b) => (b === null ? null : b.q[which])),
      text: drawn.map((b) => (b === null ? "" : `${label} ${seconds(b.q[which])} of ${whole(b.n)}`)),
      name: `${brief(name)} ${label}`,
      legendgroup: String(k),
      line: { color: c.series[k % 8], dash: DASHES[k % 8], width: 2.4 },
      marker: { color: c.series[k % 8], symbol: SYMBOLS[k % 8], size: 7 },
      hovertemplate: "%{text}<extra>" + brief(name) + "</extra>",
    });
    low = Math.min(low, ...told.map((b) => b.q[which]));
    high = Math.max(high, ...told.map((b) => b.q[which]));
  });
  // Lines lie over the dots of all classes.
  data.push(...lines);
  if (!data.length) return null;
  return {
    data,
    layout: layout({
      xaxis: { type: "date", title: { text: "arrival, UTC" }, range: timeRange().map((t) => lat.first_ms + t * 1000) },
      yaxis: secondsAxis(low, high, { title: { text: metric } }),
      hovermode: "closest",
      ...windows(),
    }),
  };
}

function latencyCharts() {
  if (!page.data.latency.n) return;
  chart("dist", drawDistribution);
  chart("times", drawTimes);
  for (const name of ["dist", "times"]) {
    on(`${name}-metric`, "change", () => {
      filtersSay();
      redraw([name]);
    });
  }
}
