"use strict";
// Draws the page from the JSON above. Every text of a run goes through textContent; only the boards are markup (made by chess.svg).
const RUNS = JSON.parse(document.getElementById("data").textContent).runs;
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const color = (i) => `var(--c${i % 8})`;
const runName = (run) => run.label || run.name;
const byId = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(2) + " G";
  if (size >= 1e5) return (value / 1e3).toFixed(0) + " k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(4));
}
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const duration = (s) => (s < 120 ? s.toFixed(0) + " s" : s < 7200 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h");
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? null;

// ---- curves -------------------------------------------------------------------------------------------------------------------

// All components in one chart; with several runs one chart each, for colour then says the run.
function componentCharts() {
  const found = RUNS.flatMap((run) => Object.keys(run.series)).map((name) => name.match(/^reward\/(.+)\/mean$/)).filter(Boolean);
  const names = [...new Set(found.map((match) => match[1]))].sort();
  const series = names.map((name) => [`reward/${name}/mean`, name]);
  if (RUNS.length === 1) return [{ title: "Reward components", unit: "mean before weights", series }];
  return series.map((one) => ({ title: `Reward: ${one[1]}`, unit: "mean before weights", series: [one] }));
}

// title, unit, series: [metric, label]; `held`: metrics of the held-out evaluations, drawn as points; `exact`: no noise to smooth
const CHARTS = [
  { title: "Reward", unit: "iteration mean; points: held-out", series: [["reward/mean", "reward"]],
    held: [["eval/greedy/reward", "greedy"], ["eval/sampled/reward", "sampled"]] },
  { title: "Legal moves", unit: "share; points: held-out", series: [["legal_move_rate", "legal"]],
    held: [["eval/greedy/legal", "greedy"], ["eval/sampled/legal", "sampled"]] },
  ...componentCharts(),
  { title: "KL to the reference", unit: "nats per token", series: [["kl/mean", "mean"], ["kl/p95", "95th percentile"]] },
  { title: "Entropy", unit: "nats per token", series: [["entropy", "entropy"]] },
  { title: "Clip fraction", unit: "share of tokens, last step of the iteration", series: [["clip_fraction/low", "low"], ["clip_fraction/high", "high"]] },
  { title: "KL coefficient", unit: "beta", exact: true, series: [["beta", "beta"]] },
  { title: "Ratio off 1", unit: "mean |ratio − 1| of tokens", series: [["ratio/deviation", "last step"], ["ratio/first_deviation", "first step"]] },
  { title: "Gradient norm", unit: "before clipping", series: [["grad_norm", "norm"]] },
  { title: "Loss", unit: "minus the surrogate objective, plus KL", series: [["loss", "loss"], ["policy_loss", "policy"]] },
  { title: "Learning rate", unit: "of the last step", exact: true, series: [["learning_rate", "rate"]] },
  { title: "Groups without signal", unit: "all completions earn the same", series: [["groups_without_signal", "groups"]] },
  { title: "Groups drawn for a batch", unit: "refill: all, and those without signal", series: [["refill/drawn", "drawn"], ["refill/without_signal", "without signal"]] },
  { title: "Prompts by the curriculum", unit: "known so far; solved; never passed", series: [["curriculum/known", "known"], ["curriculum/retired", "solved"], ["curriculum/never_passed", "never passed"]] },
  { title: "Thrown away by refill", unit: "tokens of completions", series: [["refill/discarded_tokens", "discarded"], ["refill/unused_tokens", "generated ahead, not needed"]] },
  { title: "Completion length", unit: "tokens", series: [["completion_length/mean", "mean"]] },
  { title: "Cut at the cap, distinct", unit: "share of completions", series: [["truncated_fraction", "cut"], ["completions/distinct", "distinct in a group"]] },
  { title: "Sampling against training", unit: "difference of log-probabilities, nats", series: [["logp_mismatch/mean", "mean"], ["logp_mismatch/max", "largest"]] },
];
const RESOURCES = [
  { title: "Time of an iteration", unit: "seconds", series: [["time/iteration", "iteration"]] },
  { title: "Generation", unit: "tokens per second", series: [["tokens_per_second", "tokens/s"]] },
  { title: "Memory, peak so far", unit: "bytes", exact: true, series: [["memory/host_peak_bytes", "process"], ["memory/device_peak_bytes", "device"]] },
];
const cursors = []; // of every chart: moved together
let smoothing = 0.8;

// One chart's lines: colour says the run where there are several, else the metric; then the dash says the metric.
function linesOf(spec) {
  const lines = [];
  RUNS.forEach((run, r) => {
    const many = RUNS.length > 1;
    spec.series.forEach(([metric, label], m) => {
      const values = run.series[metric];
      if (!values || !known(values).length) return;
      lines.push({ label: many ? `${runName(run)}${spec.series.length > 1 ? " " + label : ""}` : label, color: color(many ? r : m),
        dash: many ? DASHES[m % 4] : "", x: run.iterations, y: values, dots: false });
    });
    (spec.held || []).forEach(([metric, label], h) => {
      const points = run.evaluations[metric];
      if (points) lines.push({ label: `${many ? runName(run) + " " : ""}held-out ${label}`, color: color(many ? r : h + 1), dash: "",
        x: points.map((p) => p[0]), y: points.map((p) => p[1]), dots: true, filled: h === 0 });
    });
  });
  return lines;
}

function smooth(values) {
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = smoothing * total + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return total / weight;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= raw);
  const out = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) out.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return out;
}

const W = 380, H = 210, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 22;

function chart(spec) {
  const lines = linesOf(spec);
  if (!lines.length) return null;
  const xs = lines.flatMap((line) => line.x), ys = lines.flatMap((line) => known(line.y));
  const x0 = xs.reduce((a, b) => Math.min(a, b)), x1 = Math.max(x0 + 1, xs.reduce((a, b) => Math.max(a, b)));
  let y0 = ys.reduce((a, b) => Math.min(a, b)), y1 = ys.reduce((a, b) => Math.max(a, b));
  const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  [y0, y1] = [y0 >= 0 && y0 <= (y1 - y0) * 0.5 ? 0 : y0 - room, y1 + room];
  const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT), Y = (y) => H - BOTTOM - ((y - y0) / (y1 - y0)) * (H - TOP - BOTTOM);
  const summary = lines.map((line) => { const v = known(line.y); return `${line.label}: from ${show(v[0])} to ${show(v[v.length - 1])}`; }).join("; ");
  const svg = make("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: "0", "aria-label": `${spec.title}, ${spec.unit}. ${summary}` });
  for (const t of ticks(y0, y1, 4)) {
    svg.append(make("svg:line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: Y(t), y2: Y(t) }));
    svg.append(make("svg:text", { x: LEFT - 5, y: Y(t) + 4, "text-anchor": "end" }, show(t)));
  }
  for (const t of ticks(x0, x1, 5).filter(Number.isInteger)) svg.append(make("svg:text", { x: X(t), y: H - 6, "text-anchor": "middle" }, String(t)));
  const drawn = make("svg:g");
  const cursor = make("svg:line", { class: "cursor", y1: TOP, y2: H - BOTTOM });
  svg.append(drawn, cursor);
  const path = (line, values) => {
    let pen = "M";
    return values.map((v, i) => { if (v === null) { pen = "M"; return ""; } const d = `${pen}${X(line.x[i]).toFixed(1)} ${Y(v).toFixed(1)}`; pen = "L"; return d; }).join("");
  };
  const draw = () => {
    drawn.replaceChildren();
    for (const line of lines) {
      if (line.dots) {
        line.y.forEach((v, i) => drawn.append(make("svg:circle", { cx: X(line.x[i]), cy: Y(v), r: 4, style: `fill:${line.filled ? line.color : "var(--card)"};stroke:${line.color};stroke-width:2` })));
        continue;
      }
      const smoothed = smoothing > 0 && line.y.length > 20 && !spec.exact;
      if (smoothed) drawn.append(make("svg:path", { class: "raw", d: path(line, line.y), style: `stroke:${line.color}` }));
      const d = path(line, smoothed ? smooth(line.y) : line.y);
      if (line.y.length === 1) drawn.append(make("svg:circle", { cx: X(line.x[0]), cy: Y(line.y[0]), r: 3, style: `fill:${line.color}` }));
      drawn.append(make("svg:path", { class: "curve", d, style: `stroke:${line.color};stroke-dasharray:${line.dash || "none"}` }));
    }
  };
  draw();
  const tip = make("div", { class: "tip", role: "status" });
  const card = make("figure", { class: "card chart", style: "margin:0", "data-chart": spec.title },
    make("figcaption", {}, make("h3", {}, spec.title + " ", make("span", { class: "unit" }, spec.unit))), svg, tip);
  const mark = (line) => line.dots ? make("b", { style: `border-color:${line.color};background:${line.filled ? line.color : "none"}` })
    : make("i", { style: `border-color:${line.color};border-top-style:${line.dash ? "dashed" : "solid"}` });
  if (lines.length > 1) card.append(make("div", { class: "legend" }, ...lines.map((line) => make("span", {}, mark(line), line.label))));
  const place = (iteration) => {
    const hidden = iteration === null || iteration < x0 || iteration > x1;
    cursor.style.visibility = hidden ? "hidden" : "visible";
    if (!hidden) { cursor.setAttribute("x1", X(iteration)); cursor.setAttribute("x2", X(iteration)); }
  };
  const read = (iteration) => {
    tip.replaceChildren(make("strong", {}, `iteration ${iteration}`));
    for (const line of lines) {
      const i = line.x.indexOf(iteration);
      if (i >= 0) tip.append(make("div", {}, make("i", { class: "swatch", style: `border-color:${line.color}` }), `${line.label}: ${show(line.y[i])}`));
    }
    tip.style.visibility = "visible";
    const side = X(iteration) > W / 2;
    tip.style.left = side ? "auto" : `${(100 * X(iteration)) / W + 3}%`;
    tip.style.right = side ? `${100 - (100 * X(iteration)) / W + 3}%` : "auto";
  };
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  const nearest = (x) => steps.reduce((best, s) => (Math.abs(s - x) < Math.abs(best - x) ? s : best), steps[0]);
  let at = null;
  const go = (iteration) => { at = iteration; cursors.forEach((chart) => chart.place(iteration)); read(iteration); };
  const leave = () => { cursors.forEach((chart) => chart.place(null)); tip.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    go(nearest(x0 + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (x1 - x0)));
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -steps.length, End: steps.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const from = at === null ? steps.length - 1 : steps.indexOf(at);
    go(steps[Math.max(0, Math.min(steps.length - 1, from + move))]);
  });
  cursors.push({ place, draw });
  return card;
}

// ---- histograms over time -------------------------------------------------------------------------------------------------------

function heatmap(run, name, data) {
  const columns = data.shares.length, bins = data.shares[0].length, cell = 8;
  const canvas = make("canvas", { width: columns * cell, height: bins * cell, tabindex: "0", role: "img" });
  const last = data.shares[columns - 1];
  const range = (b) => `${show(data.low + ((data.high - data.low) * b) / bins)} to ${show(data.low + ((data.high - data.low) * (b + 1)) / bins)}`;
  const top = last.indexOf(Math.max(...last));
  canvas.setAttribute("aria-label", `${name} of ${runName(run)}: at iteration ${data.iterations[columns - 1]}, ${percent(last[top])} of completions scored ${range(top)}`);
  const paint = () => {
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c0").trim();
    data.shares.forEach((column, i) => column.forEach((share, b) => {
      pen.globalAlpha = Math.sqrt(share); // a few completions in a hundred must still be seen
      pen.fillRect(i * cell, (bins - 1 - b) * cell, cell, cell);
    }));
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  const tip = make("div", { class: "tip" });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    const b = Math.min(bins - 1, Math.max(0, bins - 1 - Math.floor(((event.clientY - box.top) / box.height) * bins)));
    tip.replaceChildren(make("strong", {}, `iteration ${data.iterations[i]}`), make("div", {}, `${range(b)}: ${percent(data.shares[i][b])}`));
    tip.style.visibility = "visible";
    tip.style.left = i > columns / 2 ? "auto" : `${(100 * i) / columns + 3}%`;
    tip.style.right = i > columns / 2 ? `${100 - (100 * i) / columns + 3}%` : "auto";
  });
  canvas.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; });
  return make("figure", { class: "card chart", style: "margin:0", "data-histogram": name },
    make("figcaption", {}, make("h3", {}, name.replace(/^reward\//, "") + " ", make("span", { class: "unit" }, `${RUNS.length > 1 ? runName(run) + ", " : ""}${show(data.low)} (bottom) to ${show(data.high)} (top)`))),
    canvas, tip, make("div", { class: "ends" }, make("span", {}, `iteration ${data.iterations[0]}`), make("span", {}, String(data.last))));
}

// ---- completions ------------------------------------------------------------------------------------------------------------------

function sampleCard(sample) {
  const card = make("article", { class: `card ${sample.board ? "board" : "text"}` });
  if (sample.board) {
    const holder = make("div", { role: "img", "aria-label": sample.board.label });
    holder.innerHTML = sample.board.svg; // chess.svg's own markup of a parsed position
    card.append(holder, make("p", {}, sample.board.label));
  }
  card.append(make("p", { class: "mono" }, make("span", { class: "prompt" }, sample.prompt), make("strong", {}, sample.completion)));
  card.append(make("div", { class: "chips" }, make("span", { class: "reward" }, `reward ${show(sample.reward)}`),
    ...Object.entries(sample.components).map(([name, value]) => make("span", {}, `${name} ${show(value)}`))));
  return card;
}

function completions(run) {
  const box = make("div");
  if (RUNS.length > 1) box.append(make("h3", {}, runName(run)));
  if (!run.samples.length) {
    box.append(make("p", { class: "hint" }, "None recorded (logging.samples_every is 0, or an older run)."));
    return box;
  }
  const boards = make("div", { class: "boards" });
  const select = make("select", { "aria-label": `Iteration of the completions of ${runName(run)}` },
    ...run.samples.map((record, i) => make("option", { value: i }, `iteration ${record.iteration}`)));
  const fill = () => boards.replaceChildren(...run.samples[select.value].samples.map(sampleCard));
  select.value = run.samples.length - 1;
  select.addEventListener("change", fill);
  fill();
  box.append(select, boards);
  return box;
}

// ---- head, health, time, settings ---------------------------------------------------------------------------------------------------

function facts(run) {
  const last = (metric) => mean(known((run.series[metric] || []).slice(-10)));
  const held = (metric, form) => { const p = run.evaluations[metric]; return p ? [p[0], ...p.slice(1).slice(-1)].map((point) => form(point[1])).join(" → ") : null; };
  const seconds = known(run.series["time/iteration"] || []).reduce((a, b) => a + b, 0) * run.step;
  return [
    ["iterations", String(run.iterations[run.iterations.length - 1] + 1)],
    ["reward, last ten", show(last("reward/mean"))],
    ["held-out legal, greedy", held("eval/greedy/legal", percent)],
    ["held-out reward, sampled", held("eval/sampled/reward", show)],
    ["KL, last ten", show(last("kl/mean"))],
    ["iterations took", duration(seconds)],
  ].filter(([, value]) => value !== null);
}

function timing() {
  const phases = [...new Set(RUNS.flatMap((run) => Object.keys(run.series).filter((name) => name.startsWith("time/") && name !== "time/iteration")))];
  const box = make("div", { class: "card", "data-chart": "Timing" }, make("h3", {}, "Where an iteration's time goes ", make("span", { class: "unit" }, "median seconds by phase")));
  for (const run of RUNS) {
    const whole = median(known(run.series["time/iteration"] || []));
    if (whole === null) continue;
    const parts = phases.map((name, i) => [name.slice(5), median(known(run.series[name] || [])) || 0, color(i)]);
    const rest = whole - parts.reduce((sum, part) => sum + part[1], 0);
    if (rest > 0.005 * whole) parts.push(["other", rest, "var(--muted)"]);
    const total = parts.reduce((sum, part) => sum + part[1], 0) || 1;
    const words = parts.map(([name, s]) => `${name} ${show(s)} s`).join(", ");
    if (RUNS.length > 1) box.append(make("p", { class: "unit" }, runName(run)));
    box.append(make("div", { class: "bar", role: "img", "aria-label": words }, ...parts.map(([name, s, c]) => make("span", { style: `width:${(100 * s) / total}%;background:${c}`, title: `${name}: ${show(s)} s` }))),
      make("div", { class: "legend" }, ...parts.map(([name, s, c]) => make("span", {}, make("i", { style: `border-color:${c}` }), `${name} ${show(s)} s (${percent(s / total)})`))));
  }
  return box;
}

// Rows of key and one value a run; `differing`: only keys whose values are not all equal.
function table(kind, differing) {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run[kind])))].filter((key) => !differing || new Set(RUNS.map((run) => run[kind][key])).size > 1);
  if (!keys.length) return null;
  return make("div", { class: "scroll" }, make("table", { "data-table": differing ? `${kind} differences` : kind },
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, kind === "config" ? "setting" : ""), ...RUNS.map((run) => make("th", { scope: "col" }, runName(run))))),
    make("tbody", {}, ...keys.map((key) => make("tr", {}, make("th", { scope: "row" }, make("code", {}, key)), ...RUNS.map((run) => make("td", {}, make("code", {}, run[kind][key] ?? "–"))))))));
}

function settings() {
  const box = make("div", { class: "card" });
  if (RUNS.length > 1) {
    box.append(make("h3", {}, "Settings that differ"));
    const known = RUNS.every((run) => Object.keys(run.config).length);
    box.append(table("config", true) || make("p", { class: "hint" }, known ? "None: the runs have one configuration." : "No config.yaml to compare."));
  }
  box.append(make("h3", {}, "Environment"), table("environment", false) || make("p", { class: "hint" }, "Not recorded: no run.json in the folder."));
  box.append(make("details", {}, make("summary", {}, "All settings"), table("config", false) || make("p", { class: "hint" }, "No config.yaml in the folder.")));
  return box;
}

function page() {
  document.title = RUNS.map(runName).join(", ") + " – jax_grpo report";
  RUNS.forEach((run, r) => byId("runs").append(make("li", { class: "card" },
    make("div", { class: "name" }, RUNS.length > 1 ? make("i", { class: "swatch", style: `border-color:${color(r)}` }) : null, runName(run)),
    make("dl", { class: "facts" }, ...facts(run).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))))));
  for (const run of RUNS) for (const finding of run.health)
    byId("health").append(make("p", { class: "finding" }, `${RUNS.length > 1 ? runName(run) + ", " : ""}iteration ${finding.iteration}: ${finding.line}`));
  const watched = RUNS.filter((run) => !run.missing.includes("health.jsonl"));
  if (watched.length && !RUNS.some((run) => run.health.length)) byId("health").append(make("p", { class: "healthy" }, "✓ The health checks found nothing wrong."));
  byId("charts").append(...CHARTS.map(chart).filter(Boolean));
  const maps = RUNS.flatMap((run) => Object.entries(run.histograms).map(([name, data]) => heatmap(run, name, data)));
  byId("histograms").append(...(maps.length ? maps : [make("p", { class: "hint" }, "None recorded (an older run).")]));
  byId("completions").append(...RUNS.map(completions));
  byId("timing").append(timing());
  byId("resources").append(...RESOURCES.map(chart).filter(Boolean));
  byId("tables").append(settings());
  const step = Math.max(...RUNS.map((run) => run.step));
  if (step > 1) byId("curves").querySelector(".hint").append(` Each point is the mean of ${step} iterations.`);
  byId("smoothing").addEventListener("input", (event) => { smoothing = Number(event.target.value); cursors.forEach((c) => c.draw()); });
  document.documentElement.dataset.drawn = "yes";
}
page();
