// dashboard.js - the coordinator's JSON as a page: jobs, curves, heat maps, moves, workers
//
// All texts go in as text, never as HTML. Curves grow by the steps that are new.
"use strict";

const REFRESH_MS = 2000, SLOW_MS = 6000, STEPS_KEPT = 5000, MAPPED_PX = 220, PHASES_SHOWN = 8;
const $ = (id) => document.getElementById(id);

const shown = { job: null, steps: [], attempt: 0, moves: [], last: 0 };
const charts = {};

// ---- texts ------------------------------------------------------------------------------------

const known = (x) => x !== null && x !== undefined;
const fixed = (x, digits) => (known(x) ? x.toFixed(digits) : "–");
const whole = (x) => (known(x) ? Math.round(x).toLocaleString("en") : "–");
const percent = (x) => (known(x) && x > 0 ? (100 * x).toFixed(1) + " %" : "–");
const clock = (at) => (at ? new Date(at).toLocaleTimeString([], { hour12: false }) : "–");

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return known(n) ? n.toFixed(i ? 1 : 0) + " " + units[i] : "–";
}

function duration(s) {
  if (!known(s) || !isFinite(s)) return "–";
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${Math.floor(s % 60)} s` : `${s.toFixed(0)} s`;
}

const LOOKS = {
  RUNNING: "good", DONE: "good", IDLE: "good", BUSY: "busy", STARTING: "busy", QUEUED: "faint",
  FAILED: "bad", LOST: "bad", SICK: "bad", CANCELLED: "faint", GONE: "faint",
};
const look = (state) => LOOKS[state] || "warn";

// ---- elements ---------------------------------------------------------------------------------

function make(tag, text, className) {
  const e = document.createElement(tag);
  if (known(text)) e.textContent = text;
  if (className) e.className = className;
  return e;
}

// columns: [head, text of a row, class or function of the row]
function fill(table, columns, rows, none) {
  const head = make("tr"), body = rows.map((row) => {
    const tr = make("tr");
    for (const [, text, style] of columns)
      tr.append(make("td", text(row), typeof style === "function" ? style(row) : style));
    return tr;
  });
  for (const [title, , style] of columns)
    head.append(make("th", title, style === "right" ? "right" : ""));
  table.replaceChildren(...(rows.length ? [head, ...body] : [make("caption", none, "faint")]));
}

// ---- asking -----------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch("api/v1/" + path);
  const value = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(value.message), { status: answer.status });
  return value;
}

// What is not there yet is empty, not an error.
async function list(path, name) {
  try {
    return (await ask(path))[name];
  } catch (e) {
    if (e.status === 409 || e.status === 404) return [];
    throw e;
  }
}
const items = (path) => list(path, "items");
const windows = (path) => list(path, "windows");

// ---- jobs -------------------------------------------------------------------------------------

function showJobs(jobs) {
  if (!shown.job && jobs.length)
    choose((jobs.find((j) => j.state === "RUNNING") || jobs[0]).id);
  $("jobs").replaceChildren(...jobs.map((j) => {
    const button = make("button"), what = make("div", null, "what"), bar = make("progress");
    what.append(make("span", `${j.id}  ${j.name}`, "name"), make("span", j.state,
                "state " + look(j.state)));
    bar.max = j.steps || 1;
    bar.value = j.step;
    button.append(what, bar);
    button.setAttribute("aria-current", j.id === shown.job);
    button.onclick = () => { choose(j.id); refresh(); };
    const item = make("li");
    item.append(button);
    return item;
  }));
  if (!jobs.length) $("jobs").append(make("li", "none yet: ballast submit JOB.yaml", "faint"));
}

function choose(id) {
  Object.assign(shown, { job: id, steps: [], moves: [], last: 0 });
}

function showTiles(j) {
  const newest = shown.steps[shown.steps.length - 1] || {};
  const validated = shown.steps.filter((s) => known(s.validation_loss)).pop() || {};
  const seconds = newest.phases ? stepSeconds(newest) : null;
  const left = j.state === "RUNNING" && seconds ? (j.steps - j.step) * seconds : null;
  const tiles = [
    ["step", `${whole(j.step)} / ${whole(j.steps)}`], ["left", duration(left)],
    ["loss", fixed(j.loss, 4)], ["validation", fixed(validated.validation_loss, 4)],
    ["tokens/s", whole(j.tokens_per_second)], ["MFU", percent(newest.mfu)],
    ["imbalance", fixed(j.imbalance, 2)], ["gradient norm", fixed(newest.grad_norm, 3)],
    ["learning rate", known(newest.lr) ? newest.lr.toExponential(2) : "–"],
    ["memory of a rank", bytes(j.memory_bytes)], ["as planned", bytes(j.memory_planned_bytes)],
    ["checkpoint", j.checkpoint_step ? "step " + whole(j.checkpoint_step) : "–"],
    ["attempt", `${j.attempt}, ${j.restarts} restarts`], ["workers", whole(j.workers)],
  ];
  $("job-title").replaceChildren(make("span", `Job ${j.id}: ${j.name}, of ${j.user}  `),
                                 make("span", j.state, "state " + look(j.state)));
  $("job-reason").textContent = j.reason || "";
  $("tiles").replaceChildren(...tiles.map(([name, text]) => {
    const tile = make("div");
    tile.append(make("dt", name), make("dd", text));
    return tile;
  }));
}

// ---- curves -----------------------------------------------------------------------------------

const isPhase = (name) => !name.endsWith("_hidden");
const stepSeconds = (s) => Object.entries(s.phases).reduce(
  (sum, [name, x]) => sum + (isPhase(name) ? x : 0), 0);

const COLORS = ["#2467c9", "#d1622b", "#1f8a4c", "#8a4fbf", "#b8860b", "#c4302b", "#17919b",
                "#7a7f87", "#e07bb0", "#556b2f", "#4b6a9b", "#a0522d"];

// Lines where experts moved.
const moveLines = {
  id: "moveLines",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea: area, scales: { x } } = chart;
    if (!chart.options.showsMoves) return;
    ctx.save();
    ctx.strokeStyle = "#1f8a4c";
    ctx.setLineDash([3, 3]);
    for (const step of shown.moves) {
      const at = x.getPixelForValue(step);
      if (at < area.left || at > area.right) continue;
      ctx.beginPath();
      ctx.moveTo(at, area.top);
      ctx.lineTo(at, area.bottom);
      ctx.stroke();
    }
    ctx.restore();
  },
};

function lineChart(id, sets, options) {
  const ink = getComputedStyle(document.body).getPropertyValue("--faint");
  const axis = (more) => ({ type: "linear", ticks: { color: ink, maxTicksLimit: 7 },
                            grid: { color: "rgba(128,128,128,.2)" }, ...more });
  return new Chart($(id), {
    type: "line",
    data: { datasets: sets },
    options: {
      animation: false, parsing: false, normalized: true, maintainAspectRatio: false,
      interaction: { mode: "nearest", axis: "x", intersect: false },
      elements: { point: { radius: 0 }, line: { borderWidth: 1.5 } },
      plugins: { legend: { display: sets.length !== 1, position: "top", align: "end",
                           labels: { color: ink, boxWidth: 10 } } },
      scales: { x: axis({ min: 0, bounds: "data",
                          title: { display: true, text: "step", color: ink } }),
                y: axis(options.y) },
      ...options.more,
    },
    plugins: [moveLines],
  });
}

const set = (label, i, more) => ({ label, data: [], borderColor: COLORS[i % COLORS.length],
                                   backgroundColor: COLORS[i % COLORS.length] + "99", ...more });

function makeCharts() {
  charts.loss = lineChart("chart-loss", [set("training", 0),
    set("validation", 1, { pointRadius: 3, borderDash: [4, 3] })], {});
  charts.speed = lineChart("chart-speed", [set("tokens/s", 2)], { y: { min: 0 } });
  charts.imbalance = lineChart("chart-imbalance", [set("imbalance", 3)],
                               { y: { min: 1 }, more: { showsMoves: true } });
  charts.phases = lineChart("chart-phases", [], { y: { min: 0, stacked: true } });
}

const points = (steps, value) => steps.filter((s) => known(value(s)))
  .map((s) => ({ x: s.step, y: value(s) }));

function showPhases(steps) {
  const sums = {};
  for (const s of steps)
    for (const [name, x] of Object.entries(s.phases))
      if (isPhase(name)) sums[name] = (sums[name] || 0) + x;
  const sorted = Object.keys(sums).sort((a, b) => sums[b] - sums[a]);
  const names = sorted.slice(0, PHASES_SHOWN), small = sorted.slice(PHASES_SHOWN);
  const seconds = (s, name) => (name !== "rest" ? s.phases[name] || 0
    : small.reduce((sum, n) => sum + (s.phases[n] || 0), 0));
  if (small.length) names.push("rest");
  charts.phases.data.datasets = names.map((name, i) => set(name, i, {
    fill: i ? "-1" : "origin", borderWidth: 0,
    data: steps.map((s) => ({ x: s.step, y: seconds(s, name) })),
  }));
}

function showCurves() {
  if (!window.Chart) {
    $("charts").replaceChildren(make("p", "Built without charts: the package libjs-chart.js was "
                                     + "missing. The numbers: ballast metrics --csv", "faint"));
    return;
  }
  if (!charts.loss) makeCharts();
  const all = shown.steps;
  charts.loss.data.datasets[0].data = points(all, (s) => s.loss);
  charts.loss.data.datasets[1].data = points(all, (s) => s.validation_loss);
  charts.speed.data.datasets[0].data = points(all, (s) => s.tokens_per_second);
  charts.imbalance.data.datasets[0].data = points(all, (s) => s.imbalance);
  showPhases(all.slice(-400));
  for (const c of Object.values(charts)) c.update();
}

function addSteps(news) {
  if (!news.length) return;
  const first = news[0].step; // a new attempt begins at a step that was there before
  shown.steps = shown.steps.filter((s) => s.step < first).concat(news).slice(-STEPS_KEPT);
  shown.last = news[news.length - 1].step;
}

// ---- heat maps --------------------------------------------------------------------------------

// Blue below the mean, white at it, red above; so many octaves either way.
const EXPERT_OCTAVES = 2, DEVICE_OCTAVES = 0.5;

function shade(overMean, octaves) {
  const x = Math.max(-1, Math.min(1, Math.log2(Math.max(overMean, 1e-6)) / octaves));
  const to = x < 0 ? [33, 102, 172] : [178, 24, 43], part = Math.abs(x);
  return to.map((c) => Math.round(247 + (c - 247) * part));
}

// rows: of numbers over their mean. text(row, column): what the pointer tells.
function showMap(canvas, output, rows, octaves, text) {
  const wide = Math.max(1, ...rows.map((r) => r.length)), high = rows.length;
  canvas.parentElement.hidden = !high;
  if (!high) return;
  canvas.width = wide;
  canvas.height = high;
  canvas.style.height = Math.min(MAPPED_PX, Math.max(40, 14 * high)) + "px";
  const image = new ImageData(wide, high);
  rows.forEach((row, y) => row.forEach((x, i) => {
    image.data.set([...shade(x, octaves), 255], 4 * (y * wide + i));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.onmousemove = (e) => {
    const x = Math.floor(e.offsetX / canvas.clientWidth * wide);
    const y = Math.floor(e.offsetY / canvas.clientHeight * high);
    output.textContent = rows[y] && known(rows[y][x]) ? text(y, x, rows[y][x]) : "";
  };
  canvas.onmouseleave = () => { output.textContent = ""; };
}

const overMean = (row) => {
  const mean = row.reduce((a, b) => a + b, 0) / Math.max(1, row.length);
  return row.map((x) => (mean ? x / mean : 1));
};

function showExperts(layers) {
  showMap($("heat-map"), $("heat-at"), layers.map((l) => overMean(l.tokens)),
          EXPERT_OCTAVES,
          (y, x, v) => `layer ${layers[y].layer}, expert ${x}: ${whole(layers[y].tokens[x])} `
                     + `tokens, ${v.toFixed(2)} times the mean`);
}

function showDevices(past) {
  const n = Math.max(0, ...past.map((w) => w.device_load.length));
  const rows = Array.from({ length: n }, (_, d) => past.map((w) => w.device_load[d]));
  showMap($("devices-map"), $("devices-at"), rows, DEVICE_OCTAVES,
          (y, x, v) => `rank ${y}, steps ${past[x].first_step} to ${past[x].last_step}: `
                     + `${v.toFixed(2)} times the mean`);
}

// ---- tables -----------------------------------------------------------------------------------

function showMoves(plans) {
  shown.moves = plans.filter((p) => p.state === "DONE").map((p) => p.step);
  fill($("rebalances"), [
    ["plan", (p) => p.epoch, "right"], ["", (p) => p.state, (p) => look(p.state)],
    ["at", (p) => clock(p.at)], ["step", (p) => whole(p.step), "right"],
    ["by", (p) => (p.automatic ? "auto" : "a person")],
    ["experts", (p) => whole(p.moves), "right"], ["bytes", (p) => bytes(p.bytes), "right"],
    ["pause", (p) => `${(1e3 * (p.pause_seconds || 0)).toFixed(1)} ms`, "right"],
    ["imbalance", (p) => fixed(p.imbalance.before, 2), "right"],
    ["predicted", (p) => fixed(p.imbalance.predicted, 2), "right"],
    ["after", (p) => fixed(p.imbalance.after, 2), "right"],
    ["why", (p) => p.reason || p.cause],
  ], plans.slice(-20).reverse(), "none yet");
}

function showEvents(events) {
  fill($("events"), [
    ["at", (e) => clock(e.at)], ["kind", (e) => e.kind], ["", (e) => e.text],
  ], events.slice(-25).reverse(), "none");
}

function showWorkers(workers) {
  const gpu = (value) => (w) => (w.gpu ? value(w.gpu) : "");
  fill($("workers"), [
    ["worker", (w) => w.name], ["node", (w) => w.node],
    ["state", (w) => w.state, (w) => look(w.state)], ["device", (w) => w.device],
    ["job", (w) => (w.job ? `${w.job}, rank ${w.rank}` : "")],
    ["heard", (w) => fixed(w.heartbeat_age_seconds, 1) + " s ago", "right"],
    ["busy", gpu((g) => percent(g.utilization)), "right"],
    ["memory", gpu((g) => `${bytes(g.memory_used_bytes)} of ${bytes(g.memory_bytes)}`), "right"],
    ["°C", gpu((g) => g.temperature_celsius), "right"],
    ["W", gpu((g) => whole(g.power_watts)), "right"],
    ["", (w) => w.reason || (w.gpu && (w.gpu.sick || w.gpu.throttle_reasons.join(" "))) || ""],
  ], workers, "none has said hello");
}

function showCluster(c) {
  const words = (counts) => Object.entries(counts).filter(([, n]) => n)
    .map(([state, n]) => `${n} ${state.toLowerCase()}`).join(", ") || "none";
  $("fleet").textContent = `workers: ${words(c.workers)} · jobs: ${words(c.jobs)}`;
  $("version").textContent = `${c.version} (${c.commit}), up for ${duration(c.uptime_seconds)}`;
}

// ---- the loop ---------------------------------------------------------------------------------

let slowAt = 0, isAsking = false;

async function refreshJob(isSlow) {
  const id = shown.job, base = `jobs/${id}`;
  const news = await items(`${base}/steps?after=${shown.last}`);
  const job = await ask(base);
  if (id !== shown.job) return; // another was chosen meanwhile
  if (job.attempt !== shown.attempt && shown.last) {
    shown.last = 0; // it may have gone back to a checkpoint
    shown.steps = [];
  }
  shown.attempt = job.attempt;
  addSteps(news);
  $("job").hidden = false;
  showTiles(job);
  showEvents(job.events);
  if (isSlow) {
    const [layers, plans] = [await items(`${base}/experts`), await items(`${base}/rebalances`)];
    const fine = await windows(`${base}/load-history?window=1m`);
    const hour = await windows(`${base}/load-history?window=1h`);
    if (id !== shown.job) return;
    showExperts(layers);
    showMoves(plans);
    showDevices(fine.length > hour.length ? fine : hour);
  }
  showCurves();
}

async function refresh() {
  if (isAsking || document.hidden) return;
  isAsking = true;
  try {
    const was = shown.job, isSlow = Date.now() >= slowAt;
    showCluster(await ask("cluster"));
    showJobs((await ask("jobs")).items);
    showWorkers((await ask("workers")).items);
    if (shown.job) await refreshJob(isSlow || shown.job !== was || !shown.last);
    if (isSlow) slowAt = Date.now() + SLOW_MS;
    $("trouble").textContent = "";
  } catch (e) {
    $("trouble").textContent = "no news: " + e.message;
  } finally {
    isAsking = false;
  }
}

document.addEventListener("visibilitychange", refresh);
setInterval(refresh, REFRESH_MS);
refresh();
