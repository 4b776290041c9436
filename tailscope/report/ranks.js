// Heat maps: ranks by step, phases by layer, experts, and prompt by answer length.

// From the page's colour to one that stands out, light and dark alike; lightness alone orders the values.
function scale() {
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  return dark
    ? [[0, "#1d2833"], [0.25, "#27506f"], [0.5, "#3f87a8"], [0.75, "#8fc6b5"], [1, "#fdf3a7"]]
    : [[0, "#f4f6f8"], [0.25, "#bfd9e8"], [0.5, "#6aa6cc"], [0.75, "#2a6499"], [1, "#0a2a52"]];
}

function heat(z, x, y, text, more = {}) {
  const c = colours();
  const zmax = z.flat().reduce((a, b) => Math.max(a, b ?? 0), 0) || 1;
  return { type: "heatmap", zmin: 0, zmax, z, x, y, text, hovertemplate: "%{text}<extra></extra>", colorscale: scale(), xgap: x.length > 80 ? 0 : 1, ygap: y.length > 60 ? 0 : 1, hoverongaps: false, colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: c.dim, size: 11 }, title: { side: "right", font: { size: 11 } }, ...more.colorbar } };
}

// Ticks of a colour bar in the unit that fits.
function secondsBar(z) {
  const high = z.flat().reduce((a, b) => Math.max(a, b ?? 0), 0);
  const tickvals = [0, 0.25, 0.5, 0.75, 1].map((f) => f * high);
  return { tickvals, ticktext: tickvals.map(seconds) };
}

const rankHeight = () => {
  const ranks = Math.min(page.data.ranks[Number(value("ranks-window") || 0)].ranks.length, 64);
  return Math.max(190, 100 + ranks * (ranks > 16 ? 14 : 26));
};
const expertHeight = () => {
  const layers = Math.min(page.data.experts[Number(value("experts-grid") || 0)].layers.length, 64);
  return Math.max(200, 110 + layers * (layers > 16 ? 9 : 24));
};

const categories = (names) => ({ type: "category", showgrid: false, nticks: 24, categoryorder: "array", categoryarray: names });

function drawRanks() {
  const w = page.data.ranks[Number(value("ranks-window") || 0)];
  const what = value("ranks-what");
  const s = w.steps;
  if (!s.x.length) return null;
  const xs = [...new Set(s.x)].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const row = new Map(w.ranks.map((r, i) => [r, i]));
  const z = w.ranks.map(() => xs.map(() => null));
  s.x.forEach((x, i) => {
    z[row.get(s.rank[i])][place.get(x)] = s[what][i];
  });
  const unit = w.by_round ? "collective" : "step";
  const name = (x) => (w.each === 1 ? `${unit} ${x}` : `${unit}s ${x * w.each} to ${(x + 1) * w.each - 1}`);
  const verb = { waited: "waited", alone: "all others waited for it", own: "was late by its own work" }[what];
  const text = z.map((line, i) => line.map((v, j) => (v === null ? "" : `rank ${w.ranks[i]}, ${name(xs[j])}<br>${verb}: ${seconds(v)}`)));
  const y = w.ranks.map((r) => `rank ${r}`);
  const x = xs.map((v) => String(v * w.each));
  return {
    data: [heat(z, x, y, text, { colorbar: secondsBar(z) })],
    layout: layout({ height: rankHeight(), xaxis: { ...categories(x), title: { text: w.each === 1 ? unit : `${unit}, ${w.each} a column` } }, yaxis: { ...categories(y), autorange: "reversed" } }),
  };
}

function drawPhases() {
  const w = page.data.ranks[Number(value("ranks-window") || 0)];
  const phase = value("phases-what");
  const p = w.phases;
  const layers = [...new Set(p.layer.filter((_, i) => p.phase[i] === phase))].sort((a, b) => (a ?? 1e9) - (b ?? 1e9));
  if (!layers.length) return null;
  const place = new Map(layers.map((l, i) => [l, i]));
  const row = new Map(w.ranks.map((r, i) => [r, i]));
  const z = w.ranks.map(() => layers.map(() => null));
  p.phase.forEach((of, i) => {
    if (of === phase && row.has(p.rank[i])) z[row.get(p.rank[i])][place.get(p.layer[i])] = p.s[i] / w.step_count;
  });
  const x = layers.map((l) => (l === null ? "no layer" : String(l)));
  const y = w.ranks.map((r) => `rank ${r}`);
  const text = z.map((line, i) => line.map((v, j) => (v === null ? "" : `rank ${w.ranks[i]}, ${x[j] === "no layer" ? x[j] : `layer ${x[j]}`}<br>${phase}: ${seconds(v)} a step`)));
  return {
    data: [heat(z, x, y, text, { colorbar: secondsBar(z) })],
    layout: layout({ height: rankHeight(), xaxis: { ...categories(x), title: { text: "layer" } }, yaxis: { ...categories(y), autorange: "reversed" } }),
  };
}

function drawExperts() {
  const g = page.data.experts[Number(value("experts-grid") || 0)];
  if (!g) return null;
  const x = g.places.map(String);
  const y = g.layers.map(String);
  const inSeconds = g.unit === "s";
  const show = (v) => (inSeconds ? seconds(v) : `${Number(v.toPrecision(3))} × an even share`);
  const text = g.z.map((line, i) => line.map((v, j) => (v === null ? "" : `layer ${y[i]}, ${g.of} ${x[j]}<br>${show(v)}`)));
  return {
    data: [heat(g.z, x, y, text, { colorbar: inSeconds ? secondsBar(g.z) : { title: { text: "× even share", side: "right", font: { size: 11 } } } })],
    layout: layout({ height: expertHeight(), xaxis: { ...categories(x), title: { text: g.of } }, yaxis: { ...categories(y), title: { text: "layer" }, autorange: "reversed" } }),
  };
}

// Cells of the sample: what of each class is slow is held against the class's own p95, as in the exact numbers.
function sampledCells(places) {
  const lat = page.data.latency;
  const s = lat.sample;
  const limit = lat.classes.map((name) => {
    const told = lat.curves.TTFT?.[name];
    if (!told) return Infinity;
    const i = told.q.findIndex((q) => q >= 0.95);
    return i < 0 ? Infinity : told.s[i];
  });
  const cells = new Map();
  for (const i of places) {
    if (s.prompt[i] === null || s.output[i] === null) continue;
    const floor = (v) => (v < 2 ? 0 : 2 ** Math.floor(Math.log2(v)));
    const key = `${floor(s.prompt[i])},${floor(s.output[i])}`;
    if (!cells.has(key)) cells.set(key, { n: 0, slow: 0, ttft: [], e2e: [] });
    const cell = cells.get(key);
    cell.n += s.weight[i];
    if (s.ttft[i] > limit[s.klass[i]]) cell.slow += s.weight[i];
    if (s.ttft[i] !== null) cell.ttft.push([s.ttft[i], s.weight[i]]);
    if (s.e2e[i] !== null) cell.e2e.push([s.e2e[i], s.weight[i]]);
  }
  const median = (values) => quantile(values.sort((a, b) => a[0] - b[0]), 0.5);
  const made = { prompt: [], output: [], n: [], slow: [], ttft: [], e2e: [] };
  for (const [key, cell] of cells) {
    const [prompt, output] = key.split(",").map(Number);
    made.prompt.push(prompt);
    made.output.push(output);
    made.n.push(cell.n);
    made.slow.push(cell.slow / cell.n);
    made.ttft.push(median(cell.ttft));
    made.e2e.push(median(cell.e2e));
  }
  return made;
}

function drawShapes() {
  const what = value("shapes-what");
  const cells = narrowed() ? sampledCells(chosen()) : page.data.shapes;
  if (!cells.n.length) return null;
  const steps = (values) => {
    const known = values.filter((v) => v !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const found = [];
    for (let v = low; v <= high; v = v < 2 ? 2 : v * 2) found.push(v);
    return found;
  };
  const xs = steps(cells.prompt);
  const ys = steps(cells.output);
  const name = (v) => `${whole(v)}-${whole(v < 2 ? 1 : v * 2 - 1)}`;
  const z = ys.map(() => xs.map(() => null));
  const text = ys.map(() => xs.map(() => ""));
  cells.n.forEach((n, i) => {
    const [row, col] = [ys.indexOf(cells.output[i]), xs.indexOf(cells.prompt[i])];
    if (row < 0 || col < 0) return;
    z[row][col] = cells[what][i];
    text[row][col] = `prompts of ${name(cells.prompt[i])}, answers of ${name(cells.output[i])} tokens<br>${whole(n)} requests, ${Math.round(cells.slow[i] * 100)}% slow for their class<br>p50 TTFT ${seconds(cells.ttft[i])}, E2E ${seconds(cells.e2e[i])}`;
  });
  const most = z.flat().reduce((a, b) => Math.max(a, b ?? 0), 0);
  const shown = (v) => (v === null ? "" : what === "n" ? whole(v) : what === "slow" ? `${Math.round(v * 100)}%` : seconds(v));
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const annotations = [];
  if (xs.length * ys.length <= 120 && document.getElementById("plot-shapes").clientWidth >= 640)
    z.forEach((line, i) =>
      line.forEach((v, j) => {
        if (v !== null) annotations.push({ x: j, y: i, text: shown(v), showarrow: false, font: { size: 11, color: v > most * 0.6 !== dark ? "#fff" : dark ? "#e8edf2" : "#16202c" } });
      }),
    );
  // A dark cell takes dark ink where the scale ends light.
  if (dark) for (const a of annotations) if (z[a.y][a.x] > most * 0.6) a.font.color = "#10161d";
  const bar = what === "slow" ? { tickformat: ".0%" } : what === "n" ? {} : secondsBar(z);
  return {
    data: [heat(z, xs.map(name), ys.map(name), text, { colorbar: bar })],
    layout: layout({ height: Math.max(240, 110 + ys.length * 30), xaxis: { ...categories(xs.map(name)), title: { text: "prompt tokens" } }, yaxis: { ...categories(ys.map(name)), title: { text: "answer tokens" } }, annotations }),
  };
}

function heatCharts() {
  if (page.data.ranks.length) {
    chart("ranks", drawRanks, { nothing: "No collective of this window lies in a step.", height: rankHeight });
    chart("phases", drawPhases, { nothing: "This phase does not appear in the window.", height: rankHeight });
    on("ranks-window", "change", () => {
      const w = page.data.ranks[Number(value("ranks-window"))];
      says("ranks", w.says);
      says("phases", w.phase_says);
      redraw(["ranks", "phases"]);
    });
    on("ranks-what", "change", () => redraw(["ranks"]));
    on("phases-what", "change", () => redraw(["phases"]));
  }
  if (page.data.experts.length) {
    chart("experts", drawExperts, { height: expertHeight });
    on("experts-grid", "change", () => {
      says("experts", page.data.experts[Number(value("experts-grid"))].says);
      redraw(["experts"]);
    });
  }
  if (page.data.shapes.n.length) {
    chart("shapes", drawShapes);
    on("shapes-what", "change", () => redraw(["shapes"]));
  }
}
