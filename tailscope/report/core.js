"use strict";
// What all charts share: unpacking, numbers, colours, and when a chart is drawn.

const page = { data: null, charts: new Map(), state: {}, plotly: null };

async function unpack(id) {
  const holder = document.getElementById(id);
  const bytes = Uint8Array.from(atob(holder.textContent.trim()), (c) => c.charCodeAt(0));
  holder.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// Plotly is 5 MB of script: it is run when the first chart comes near, after what is text can be used.
function plotly() {
  page.plotly ??= unpack("plotly").then((source) => {
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    return window.Plotly;
  });
  return page.plotly;
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  const digits = (x) => String(Number(x.toPrecision(3)));
  if (size < 1e-9) return "0 s";
  if (size >= 100) return `${Number(value.toPrecision(3)).toLocaleString("en")} s`;
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const clock = (ms) => new Date(ms).toISOString().slice(11, 19);

// Names of a trace are anybody's text, and Plotly reads some HTML in texts: what could be a tag or an entity is none here.
// And values in braces.
const plain = (name) => String(name === "" ? "(none)" : name).replaceAll("%{", "% {").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
// Ids differ at their ends.
const brief = (name, most = 28) => plain(name.length > most ? `${name.slice(0, Math.ceil(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}` : name);

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    of,
    ink: of("--ink"),
    dim: of("--dim"),
    line: of("--line"),
    page: of("--page"),
    accent: of("--accent"),
    series: [0, 1, 2, 3, 4, 5, 6, 7].map((i) => of(`--k${i}`)),
  };
}

// A second way to tell lines apart.
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"];
const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "x", "star", "triangle-down"];

function layout(more = {}) {
  const c = colours();
  const axis = { gridcolor: c.line, linecolor: c.line, zerolinecolor: c.line, tickcolor: c.line, automargin: true, title: { standoff: 10 } };
  const made = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif', size: 12, color: c.dim },
    margin: { l: 56, r: 16, t: 8, b: 44 },
    hoverlabel: { bgcolor: c.page, bordercolor: c.line, font: { color: c.ink } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: c.ink }, traceorder: "normal" },
    colorway: c.series,
    ...more,
  };
  for (const name of Object.keys(made)) {
    if (/^[xy]axis\d*$/.test(name)) made[name] = { ...axis, ...made[name] };
  }
  return made;
}

// Ticks of a logarithmic axis of seconds from `low` to `high`: so close that there are three or more.
function secondsAxis(low, high, more = {}) {
  const from = Math.floor(Math.log10(Math.max(low, 1e-7)));
  const to = Math.ceil(Math.log10(Math.max(high, 1e-6)));
  const steps = to - from > 3 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 3, 5];
  const tickvals = [];
  for (let e = from; e <= to; e++) for (const s of steps) tickvals.push(s * 10 ** e);
  return { type: "log", tickvals, ticktext: tickvals.map(seconds), ...more };
}

// `draw(place)` returns {data, layout} or null for nothing to show; it is called when the chart is near, and again after changes.
function chart(name, draw, options = {}) {
  const place = document.querySelector(`[data-chart="${name}"]`);
  if (place && options.height) place.style.minHeight = `${options.height()}px`;
  if (place) page.charts.set(name, { name, draw, place, seen: false, near: false, stale: false, drawn: 0, ...options });
}

// Drawings that paper can scale.
function scalable(place) {
  for (const svg of place.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
}

async function render(one) {
  const Plotly = await plotly();
  const made = one.draw(one.place);
  if (made?.layout.height) one.place.style.minHeight = `${made.layout.height}px`;
  if (!made) {
    const note = document.createElement("p");
    note.className = "waiting";
    note.textContent = one.nothing ?? "Nothing to show in what is chosen.";
    if (one.drawn) Plotly.purge(one.place);
    one.place.replaceChildren(note);
    one.drawn = 0;
    delete one.place.dataset.drawn;
    one.place.dataset.nothing = "yes";
    return;
  }
  if (!one.drawn) one.place.replaceChildren();
  delete one.place.dataset.nothing;
  const narrow = one.place.clientWidth < 560;
  const config = { displaylogo: false, responsive: true, displayModeBar: narrow ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"], scrollZoom: false };
  await Plotly.react(one.place, made.data, made.layout, config);
  if (one.drawn === 0) one.place.on("plotly_afterplot", () => scalable(one.place));
  scalable(one.place);
  one.drawn += 1;
  one.place.dataset.drawn = String(one.drawn);
}

let asked = false;
// Draw again what has changed: now what is in sight, the rest when it comes there, or for paper.
function redraw(names, everything = false) {
  for (const one of page.charts.values()) {
    if (!names || names.includes(one.name)) one.stale = true;
    if (everything && one.stale && one.seen) refresh(one);
  }
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    for (const one of page.charts.values()) if (one.near && one.stale) refresh(one);
  });
}

function refresh(one) {
  one.seen = true;
  one.stale = false;
  return render(one);
}

function watch() {
  const sight = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const one = page.charts.get(entry.target.dataset.chart);
        one.near = entry.isIntersecting;
        if (one.near && (one.stale || !one.seen)) refresh(one);
      }
    },
    { rootMargin: "600px" },
  );
  for (const one of page.charts.values()) sight.observe(one.place);
}

const idle = () => new Promise((resolve) => (window.requestIdleCallback ? requestIdleCallback(resolve, { timeout: 2000 }) : setTimeout(resolve, 50)));

// Charts that nobody has scrolled to are drawn when there is time, one by one, so that a print has them.
async function all() {
  for (const one of page.charts.values()) {
    await idle();
    if (!one.seen) await refresh(one);
  }
}

// Run after a filter has changed.
const changed = [];

function says(name, text) {
  const place = document.getElementById(`${name}-says`);
  if (!place) return;
  place.dataset.all ??= place.textContent;
  place.textContent = text ?? place.dataset.all;
}

const value = (id) => document.getElementById(id)?.value ?? "";
const on = (id, event, run) => document.getElementById(id)?.addEventListener(event, run);
