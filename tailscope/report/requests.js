// One request: its phases, its bill, the steps it ran in, and who shared them.

const followed = () => page.data.requests.find((r) => String(r.rid) === value("request"));

const waterfallHeight = () => Math.max(170, 74 + (followed().beside.length + 1) * 26);

function drawWaterfall() {
  const r = followed();
  if (!r) return null;
  const c = colours();
  const data = [];
  const rows = r.beside.length + 1;
  const span = r.e2e ?? r.ttft;
  const bar = (from, to, row, colour, name, text, more = {}) => {
    if (from === null || to === null || !(to > from)) return;
    data.push({ type: "bar", orientation: "h", base: [from], x: [to - from], y: [row], width: row === 0 ? 0.72 : 0.5, marker: { color: colour, line: { width: 0 }, ...more.marker }, name, showlegend: false, text: [(to - from) / span > 0.09 ? (more.label ?? "") : ""], textposition: "inside", insidetextanchor: "middle", textangle: 0, textfont: { color: "#fff", size: 11 }, constraintext: "none", hovertemplate: `${text}<extra></extra>` });
  };
  const end = span;
  const first = r.ttft ?? end;
  const prefill = Math.min(r.prefill ?? 0, first);
  const queue = Math.min(r.queue ?? 0, first - prefill);
  const wait = Math.max(first - prefill - queue, 0);
  const known = r.prefill !== null || r.queue !== null;
  bar(0, wait, 0, c.of("--p-front"), "front end", `${known ? "on its way, before the queue" : "before the first token"}: ${seconds(wait)}`, { label: known ? "before the queue" : "before the first token" });
  bar(wait, wait + queue, 0, c.of("--p-queue"), "queue", `queued: ${seconds(queue)}`, { label: "queue" });
  bar(wait + queue, first, 0, c.of("--p-others2"), "prefill", `prefill: ${seconds(prefill)}`, { label: "prefill" });
  const runs = r.runs;
  if (runs) {
    // Where a scheduler told, what is between its runs is time in which it was given nothing.
    for (const [from, to] of runs.decode) bar(Math.max(from, first), to, 0, c.of("--p-own"), "decode", `decode: ${seconds(to - from)}`, { label: "decode" });
    for (const [from, to] of runs.recompute) bar(from, to, 0, c.of("--p-kv2"), "recompute", `computed again after a preemption: ${seconds(to - from)}`, { label: "again" });
    const left = [...runs.prefill, ...runs.decode, ...runs.recompute].sort((a, b) => a[0] - b[0]);
    left.slice(1).forEach(([from], i) => {
      const until = Math.max(...left.slice(0, i + 1).map(([, to]) => to), first);
      if (from - until > 0.002) bar(until, from, 0, c.of("--p-kv"), "given nothing", `given no tokens: ${seconds(from - until)}`, { label: "given nothing", marker: { pattern: { shape: "x", fillmode: "overlay", fgcolor: "#fff", fgopacity: 0.4, size: 7, solidity: 0.15 } } });
    });
  } else {
    bar(first, end, 0, c.of("--p-own"), "decode", `${r.preemptions ? "decode, and preempted" : "decode"}: ${seconds(end - first)}`, { label: r.preemptions ? "decode, and preempted" : "decode" });
  }
  r.beside.forEach((o, i) => {
    const about = `${brief(o.id)}, class ${brief(o.klass)}<br>${whole(o.prefill ?? 0)} prefill tokens meanwhile` + (o.steps ? `, in ${whole(o.steps)} of its steps` : "");
    for (const [from, to] of o.decoded) bar(from, to, i + 1, c.of("--p-own2"), "there", about);
    for (const [from, to] of o.computed) bar(from, to, i + 1, c.of("--p-others"), "prefill", `prefill of ${about}`, { marker: { pattern: { shape: "/", fillmode: "overlay", fgcolor: "#fff", fgopacity: 0.55, size: 6, solidity: 0.25 } } });
  });
  const narrow = document.getElementById("plot-waterfall").clientWidth < 560;
  const most = narrow ? 12 : 30;
  const label = (o) => `${brief(o.id, most)} ${narrow ? "" : `(${brief(o.klass, 12)})`}`;
  return {
    data,
    layout: layout({
      height: waterfallHeight(),
      barmode: "overlay",
      xaxis: { title: { text: `seconds since it arrived, ${clock(r.at_ms)} UTC` }, rangemode: "tozero" },
      yaxis: { tickvals: [...Array(rows).keys()], ticktext: ["<b>this request</b>", ...r.beside.map(label)], range: [rows - 0.4, -0.6], showgrid: false, zeroline: false },
      margin: { l: 60, r: 16, t: 8, b: 44 },
      hovermode: "closest",
    }),
  };
}

function drawRequestSteps() {
  const s = followed()?.steps;
  if (!s || !s.at.length) return null;
  const c = colours();
  const x = s.at.map((at, i) => at + s.took[i] / 2);
  const told = s.batch.some((v) => v !== null);
  const text = s.at.map((at, i) => `${seconds(at)} after arrival: ${s.steps[i] > 1 ? `${s.steps[i]} steps, ` : ""}${seconds(s.took[i])}<br>${whole(s.prefill[i] ?? 0)} prefill tokens, ${whole(s.decode[i] ?? 0)} decoding${s.kv[i] === null ? "" : `, KV ${Math.round(s.kv[i] * 100)}%`}`);
  const bars = (y, name, colour, shape) => ({ type: "bar", x, y, width: s.took, name, text, textposition: "none", hovertemplate: `%{text}<br>${name}: %{y:.3g} s<extra></extra>`, marker: { color: colour, line: { width: 0 }, pattern: shape ? { shape, fillmode: "overlay", fgcolor: "#fff", fgopacity: 0.5, size: 6, solidity: 0.25 } : {} } });
  const data = told
    ? [bars(s.batch, "the batch itself", c.of("--p-own2"), ""), bars(s.others, "others' prefill", c.of("--p-others"), "/"), bars(s.ranks, "late ranks, slow transfers", c.of("--p-rank"), "x"), bars(s.beyond, "no explanation, pauses", c.of("--p-dark"), ".")].filter((b) => b.y.some((v) => v > 0))
    : [bars(s.took, "step", c.of("--p-own2"), "")];
  const r = followed();
  const marks = [];
  if (r.prefill !== null && r.ttft) marks.push([Math.max(r.ttft - r.prefill, 0), "scheduled", 1, "right"]);
  if (r.ttft) marks.push([r.ttft, "first token", 1.07, "left"]);
  return {
    data,
    layout: layout({
      barmode: "stack",
      bargap: 0,
      xaxis: { title: { text: "seconds since it arrived" }, range: [0, 1.05 * Math.max(r.e2e ?? r.ttft, s.at.at(-1) + s.took.at(-1))] },
      yaxis: { title: { text: s.steps.some((n) => n > 1) ? "steps took, s" : "step took, s" }, rangemode: "tozero" },
      shapes: marks.map(([at]) => ({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: c.ink, width: 1, dash: "dot" } })),
      annotations: marks.map(([x, text, y, xanchor]) => ({ x, yref: "paper", y, yanchor: "bottom", xanchor, text, showarrow: false, font: { size: 11, color: c.dim } })),
      margin: { l: 56, r: 16, t: 34, b: 44 },
      legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.2, yanchor: "bottom", font: { color: c.ink } },
    }),
  };
}

function element(name, cls, text) {
  const made = document.createElement(name);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showBill() {
  const r = followed();
  const place = document.getElementById("request-bill");
  if (!r || !place) return;
  const whole_s = r.bill.reduce((sum, [, s]) => sum + s, 0);
  const head = element("div", "bar-head");
  head.append(element("strong", "", `Its bill: ${seconds(whole_s)}`));
  const facts = [`class ${r.klass}`, r.prompt === null ? null : `${whole(r.prompt)} prompt tokens${r.cached ? `, ${whole(r.cached)} cached` : ""}`, r.output === null ? null : `${whole(r.output)} answered`, r.preemptions ? `preempted ${r.preemptions}×` : null];
  head.append(element("span", "", facts.filter(Boolean).join(" · ")));
  const bar = element("div", "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", r.bill.map(([n, s]) => `${seconds(s)} ${n}`).join(", "));
  const list = element("ul", "legend");
  for (const [name, s] of r.bill) {
    const css = `p-${name.replaceAll("_", "-")}`;
    const share = s / Math.max(whole_s, 1e-12);
    if (share > 0.002) {
      const part = element("i", `segment ${css}`);
      part.style.flexGrow = String(share);
      part.title = `${seconds(s)} ${name}`;
      if (share > 0.2) part.append(element("b", "", name));
      bar.append(part);
    }
  }
  for (const [name, s] of [...r.bill].sort((a, b) => b[1] - a[1]).filter(([, s], i) => i < 2 || s > whole_s / 1000).slice(0, 8)) {
    const item = element("li");
    item.append(element("i", `swatch p-${name.replaceAll("_", "-")}`), `${seconds(s)} ${name}`);
    list.append(item);
  }
  place.replaceChildren(head, bar, list);
  if (r.culprits.length) place.append(element("p", "note", `Made to wait by: ${r.culprits.map(([n, k, s]) => `class ${k}, ${seconds(s)} (${n})`).join("; ")}`));
  const basis = r.beside.length ? (r.beside[0].basis === "told" ? "Who shared its steps is what the scheduler recorded" : "Who shared its steps is inferred from times") : r.engine_known ? "Nobody is known to have been in its steps" : "It does not say on which engine it ran, so its steps are not known";
  const most = r.beside.filter((o) => o.prefill > 0);
  says("waterfall", `${basis}${r.beside.length ? `: the ${r.beside.length} with most prefill in its time are shown.` : "."}${most.length ? ` Most is that of ${most[0].id}: ${whole(most[0].prefill)} tokens.` : ""}`);
}

function follow(rid) {
  const select = document.getElementById("request");
  if (!select || ![...select.options].some((o) => o.value === String(rid))) return false;
  select.value = String(rid);
  showBill();
  redraw(["waterfall", "request-steps"]);
  return true;
}

function requestCharts() {
  if (!page.data.requests.length) return;
  chart("waterfall", drawWaterfall, { height: waterfallHeight });
  chart("request-steps", drawRequestSteps, { nothing: "No steps are known for this request." });
  on("request", "change", () => follow(value("request")));
  // A class that is chosen leaves its own requests to choose from.
  changed.push(() => {
    const select = document.getElementById("request");
    const name = page.state.klass === null ? null : page.data.latency.classes[page.state.klass];
    for (const option of select.options) {
      const r = page.data.requests.find((one) => String(one.rid) === option.value);
      option.hidden = name !== null && r.klass !== name;
    }
    const now = select.selectedOptions[0];
    const next = now?.hidden ? [...select.options].find((option) => !option.hidden) : null;
    if (next) follow(next.value);
  });
  for (const link of document.querySelectorAll("[data-request]")) link.addEventListener("click", () => follow(link.dataset.request));
  showBill();
}
