// Steps of one engine over time: batch, duration, KV cache and queue.

function drawIterations() {
  const engines = page.data.iterations;
  const e = engines[Number(value("iterations-engine") || 0)] ?? engines[0];
  if (!e || !e.at.length) return null;
  const c = colours();
  // Where the engine stood idle between two steps, there is nothing: not the batch of the step that ends after it.
  const bin = e.binned ? (e.at.at(-1) - e.at[0]) / 600 : 0;
  const rows = [];
  e.at.forEach((end, i) => {
    const start = end - Math.max(e.took[i], bin);
    if (i > 0 && start - e.at[i - 1] > Math.max(2 * bin, 0.05)) rows.push([e.at[i - 1], null], [start, null]);
    rows.push([end, i]);
  });
  const x = rows.map(([s]) => e.first_ms + s * 1000);
  const of = (values, idle = null) => rows.map(([, i]) => (i === null ? idle : values[i]));
  const what = e.binned ? "mean of " : "";
  const hover = (i) =>
    `${clock(e.first_ms + e.at[i] * 1000)} UTC<br>${e.binned ? `${whole(e.steps[i] ?? 0)} steps, longest ` : "took "}${seconds(e.took[i])}` +
    `<br>${what}${whole(e.prefill[i] ?? 0)} prefill tokens, ${whole(e.decode[i] ?? 0)} decode tokens` +
    (e.again[i] > 0 ? `, ${whole(e.again[i])} computed again` : "") +
    (e.kv[i] === null ? "" : `<br>KV ${Math.round(e.kv[i] * 100)}%`) +
    (e.running[i] === null ? "" : `, ${whole(e.running[i])} running`) +
    (e.waiting[i] === null ? "" : `, ${whole(e.waiting[i])} waiting`);
  const text = rows.map(([, i]) => (i === null ? "idle" : hover(i)));
  const common = { x, text, hovertemplate: "%{text}<extra></extra>" };
  const area = (y, name, colour, pattern) => ({ ...common, type: "scatter", mode: "lines", y, name, stackgroup: "tokens", line: { width: 0, shape: "vh" }, fillcolor: colour, ...(pattern ? { fillpattern: { shape: pattern, fgcolor: colour, bgcolor: "rgba(0,0,0,0)", size: 5 } } : {}), yaxis: "y" });
  const line = (y, name, k, yaxis, more = {}) => ({ ...common, type: "scatter", mode: "lines", y, name, connectgaps: false, yaxis, line: { color: c.series[k], dash: DASHES[k], width: 1.8, shape: "vh" }, ...more });
  // Of three strips those that have something, from the top: batch, duration, how full it was.
  const computed = [e.prefill, e.decode, e.again].some((values) => values.some((v) => v > 0));
  const kv = e.kv.some((v) => v !== null);
  const counts = e.running.some((v) => v !== null);
  const strips = [computed && "y", "y2", (kv || counts) && "y3"].filter(Boolean);
  const each = (1 - 0.07 * (strips.length - 1)) / strips.length;
  const domain = (name) => {
    const top = 1 - strips.indexOf(name) * (each + 0.07);
    return strips.includes(name) ? [Math.max(top - each, 0), top] : [0, 0.01];
  };
  const data = [{ ...common, type: "scatter", mode: "markers", y: of(e.took), name: e.binned ? "longest step" : "step", yaxis: "y2", marker: { size: 4, color: c.series[0], symbol: "circle" } }];
  if (computed) data.unshift(area(of(e.decode, 0), "decode tokens", c.of("--p-own2"), ""), area(of(e.prefill, 0), "prefill tokens", c.of("--p-others"), "/"));
  if (e.again.some((v) => v > 0)) data.splice(2, 0, area(of(e.again, 0), "computed again", c.of("--p-kv2"), "x"));
  if (e.usual) data.push({ ...line(of(e.usual), "median step", 7, "y2") });
  if (kv) data.push(line(of(e.kv.map((v) => (v === null ? null : v * 100)), 0), "KV in use, %", 6, "y3", { fill: "tozeroy", fillcolor: "rgba(120,100,170,0.12)" }));
  if (counts) data.push(line(of(e.running, 0), "running", 2, kv ? "y4" : "y3"), line(of(e.waiting, 0), "waiting", 1, kv ? "y4" : "y3"));
  const took = e.took.filter((v) => v > 0);
  // Reduced: Math.min of many numbers would be too many arguments.
  const low = took.reduce((a, b) => Math.min(a, b), Infinity);
  const high = took.reduce((a, b) => Math.max(a, b), 0);
  const most = Math.max(4, ...[e.running, e.waiting].map((values) => values.reduce((a, b) => Math.max(a, b ?? 0), 0)));
  const nice = (v) => [1, 2, 5, 10].map((m) => m * 10 ** Math.floor(Math.log10(v))).find((m) => m >= v);
  const marks = page.data.latency.n ? windows() : { shapes: [], annotations: [] };
  const narrow = document.getElementById("plot-iterations").clientWidth < 560;
  const [from, to] = page.data.latency.n && (page.state.from > 0 || page.state.to < 1000) ? timeRange().map((t) => page.data.latency.first_ms + t * 1000) : [x[0], x.at(-1)];
  return {
    data,
    layout: layout({
      height: 560,
      margin: { l: 56, r: kv && counts ? 46 : 16, t: 8, b: 40 },
      legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { color: c.ink, size: narrow ? 10 : 12 } },
      xaxis: { type: "date", range: [from, to], anchor: strips.at(-1), title: { text: "UTC" } },
      yaxis: { domain: domain("y"), visible: computed, title: { text: "tokens" }, rangemode: "tozero" },
      yaxis2: { domain: domain("y2"), ...secondsAxis(low, high), title: { text: "took" } },
      yaxis3: kv ? { domain: domain("y3"), title: { text: "KV %" }, range: [0, 105], tickvals: [0, 50, 100] } : { domain: domain("y3"), visible: counts, title: { text: "requests" }, rangemode: "tozero" },
      yaxis4: { domain: domain("y3"), visible: kv && counts, overlaying: "y3", side: "right", range: [0, most * 1.05], dtick: nice(most / 4), showgrid: false, title: { text: "requests" } },
      hovermode: "closest",
      ...marks,
    }),
  };
}

function engineCharts() {
  if (!page.data.iterations.length) return;
  chart("iterations", drawIterations);
  const told = () => {
    const e = page.data.iterations[Number(value("iterations-engine"))];
    says("iterations", `${e.name}: ${e.binned ? `${whole(e.rows)} steps in ${whole(e.at.length)} bins of time: the mean batch, the longest step.` : `all ${whole(e.rows)} steps.`} The longest took ${seconds(e.took.reduce((a, b) => Math.max(a, b), 0))}.`);
    redraw(["iterations"]);
  };
  on("iterations-engine", "change", told);
  // An instance that is chosen is shown by its first engine.
  changed.push(() => {
    const name = page.state.instance === null ? null : page.data.latency.instances[page.state.instance];
    const first = page.data.iterations.findIndex((e) => e.instance === name);
    const select = document.getElementById("iterations-engine");
    if (!select || first < 0 || page.data.iterations[Number(select.value)].instance === name) return;
    select.value = String(first);
    told();
  });
}
