// Filters, theme, print, and the start.

function filtersSay() {
  const lat = page.data.latency;
  const out = document.getElementById("filter-says");
  if (!out) return;
  if (!narrowed()) {
    out.textContent = lat.all;
    says("dist", lat.says?.dist[value("dist-metric")]);
    says("times", lat.says?.times[value("times-metric")]);
    says("shapes");
    return;
  }
  const s = lat.sample;
  const places = chosen();
  const stand = places.reduce((sum, i) => sum + s.weight[i], 0);
  const parts = [];
  if (page.state.klass !== null) parts.push(`class ${lat.classes[page.state.klass]}`);
  if (page.state.tenant !== null) parts.push(`tenant ${lat.tenants[page.state.tenant] || "(none)"}`);
  if (page.state.instance !== null) parts.push(`instance ${lat.instances[page.state.instance] || "(none)"}`);
  const [low, high] = timeRange();
  if (page.state.from > 0 || page.state.to < 1000) parts.push(`${clock(lat.first_ms + low * 1000)} to ${clock(lat.first_ms + high * 1000)} UTC`);
  const exact = lat.sampled >= lat.n;
  const how = exact
    ? `${whole(places.length)} of ${whole(lat.n)} requests, all of them on the page.`
    : `about ${whole(stand)} of ${whole(lat.n)} requests, by the ${whole(places.length)} that are on the page.`;
  out.textContent = `Shown: ${parts.join(", ")}: ${how}`;
  const part = `Of ${parts.join(", ")} only: ${how}`;
  says("dist", needsSample() ? part : `Of ${parts.join(", ")} only, exactly.`);
  says("times", part);
  says("shapes", part);
}

function filter(change) {
  Object.assign(page.state, change);
  for (const [id, key] of [["filter-class", "klass"], ["filter-tenant", "tenant"], ["filter-instance", "instance"]]) {
    const select = document.getElementById(id);
    if (select) select.value = page.state[key] === null ? "" : String(page.state[key]);
  }
  for (const key of ["from", "to"]) {
    const slider = document.getElementById(`filter-${key}`);
    if (slider) slider.value = String(page.state[key]);
  }
  const lat = page.data.latency;
  const time = document.getElementById("filter-time");
  if (time) {
    const [low, high] = timeRange();
    time.textContent = `${clock(lat.first_ms + low * 1000)} to ${clock(lat.first_ms + high * 1000)} UTC`;
  }
  for (const row of document.querySelectorAll(".bar-row")) {
    row.hidden = page.state.klass !== null && row.dataset.class !== lat.classes[page.state.klass];
  }
  filtersSay();
  redraw(["dist", "times", "shapes", "iterations"]);
  for (const run of changed) run();
}

const nothing = () => ({ klass: null, tenant: null, instance: null, from: 0, to: 1000 });

function filters() {
  page.state = nothing();
  const number = (id) => (value(id) === "" ? null : Number(value(id)));
  on("filter-class", "change", () => filter({ klass: number("filter-class") }));
  on("filter-tenant", "change", () => filter({ tenant: number("filter-tenant") }));
  on("filter-instance", "change", () => filter({ instance: number("filter-instance") }));
  on("filter-from", "input", () => filter({ from: Math.min(number("filter-from"), page.state.to - 1) }));
  on("filter-to", "input", () => filter({ to: Math.max(number("filter-to"), page.state.from + 1) }));
  on("filter-reset", "click", () => filter(nothing()));
  document.getElementById("filters")?.addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("button[data-finding]")) {
    button.addEventListener("click", () => {
      const of = page.data.findings.find((f) => f.number === Number(button.dataset.finding));
      const lat = page.data.latency;
      const change = nothing();
      if (of.window) {
        const place = (ms) => Math.round(((ms - lat.first_ms) / 1000 / Math.max(lat.span, 1e-9)) * 1000);
        // Requests are placed by their arrival, some time before they wait.
        change.from = Math.min(Math.max(place(of.window[0]) - 20, 0), 990);
        change.to = Math.max(Math.min(place(of.window[1]) + 5, 1000), change.from + 10);
      }
      const classes = of.classes.map((name) => lat.classes.indexOf(name)).filter((k) => k >= 0);
      if (classes.length === 1) change.klass = classes[0];
      filter(change);
      document.getElementById("latency").scrollIntoView();
    });
  }
}

function theme() {
  const button = document.getElementById("theme");
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  };
  const show = () => {
    name();
    redraw();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  name();
}

// Which section is read, for the navigation.
function whereabouts() {
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
      const first = [...links.keys()].find((id) => seen.has(id));
      for (const [id, a] of links) id === first ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current");
    },
    { rootMargin: "-80px 0px -55% 0px" },
  );
  for (const id of links.keys()) {
    const section = document.getElementById(id);
    if (section) watcher.observe(section);
  }
}

// A link into a folded part unfolds it.
function unfold() {
  const target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
}

function printing() {
  let closed = [];
  let theme;
  addEventListener("beforeprint", () => {
    // Paper is white.
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    redraw(undefined, true);
    closed = [...document.querySelectorAll("details.finding:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    redraw();
  });
}

async function start() {
  // Without it (before 2023) the page is what it is without a script.
  if (!("DecompressionStream" in window)) return;
  document.documentElement.classList.add("scripted");
  page.data = JSON.parse(await unpack("data"));
  filters();
  latencyCharts();
  requestCharts();
  engineCharts();
  heatCharts();
  theme();
  printing();
  addEventListener("hashchange", unfold);
  unfold();
  whereabouts();
  filtersSay();
  watch();
  document.documentElement.dataset.ready = "yes";
  all();
}

start();
