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
  if (RUNS.length === 1) return [{ title: "Reward components", axis: "mean before weights", series }];
  return series.map((one) => ({ title: `Reward: ${one[1]}`, axis: "mean before weights", series: [one] }));
}

// title, axis: what its values are and their unit; series: [metric, label]; `held`: metrics of the held-out evaluations, which come
// first; `lead`: the reward, larger than the others; `exact`: no noise to smooth
const HELD = (name) => [[`eval/greedy/${name}`, "greedy"], [`eval/sampled/${name}`, "sampled"]];
const REWARD = { title: "Reward", axis: "reward", lead: true, series: [["reward/mean", "reward"]], held: HELD("reward") };
const CHARTS = [
  { title: "Legal moves", axis: "share of moves", series: [["legal_move_rate", "legal"]], held: HELD("legal") },
  ...componentCharts(),
  { title: "KL to the reference", axis: "nats per token", series: [["kl/mean", "mean"], ["kl/p95", "95th percentile"]] },
  { title: "Entropy", axis: "nats per token", series: [["entropy", "entropy"]] },
  { title: "Clip fraction", axis: "share of tokens, last step", series: [["clip_fraction/low", "low"], ["clip_fraction/high", "high"]] },
  { title: "KL coefficient", axis: "beta", exact: true, series: [["beta", "beta"]] },
  { title: "Ratio off 1", axis: "mean |ratio − 1| of tokens", series: [["ratio/deviation", "last step"], ["ratio/first_deviation", "first step"]] },
  { title: "Gradient norm", axis: "norm before clipping", series: [["grad_norm", "norm"]] },
  { title: "Loss", axis: "minus the objective, plus KL", series: [["loss", "loss"], ["policy_loss", "policy"]] },
  { title: "Learning rate", axis: "of the last step", exact: true, series: [["learning_rate", "rate"]] },
  { title: "Groups without signal", axis: "groups of equal rewards", series: [["groups_without_signal", "groups"]] },
  { title: "Groups drawn for a batch", axis: "groups", series: [["refill/drawn", "drawn"], ["refill/without_signal", "without signal"]] },
  { title: "Prompts by the curriculum", axis: "prompts", series: [["curriculum/known", "known"], ["curriculum/retired", "solved"], ["curriculum/never_passed", "never passed"]] },
  { title: "Thrown away by refill", axis: "tokens of completions", series: [["refill/discarded_tokens", "discarded"], ["refill/unused_tokens", "generated ahead, not needed"]] },
  { title: "Completion length", axis: "tokens", series: [["completion_length/mean", "mean"]] },
  { title: "Cut at the cap, distinct", axis: "share of completions", series: [["truncated_fraction", "cut"], ["completions/distinct", "distinct in a group"]] },
  { title: "Sampling against training", axis: "log-probabilities apart, nats", series: [["logp_mismatch/mean", "mean"], ["logp_mismatch/max", "largest"]] },
];
const RESOURCES = [
  { title: "Time of an iteration", axis: "seconds", series: [["time/iteration", "iteration"]] },
  { title: "Generation", axis: "tokens per second", series: [["tokens_per_second", "tokens/s"]] },
  { title: "Memory, peak so far", axis: "bytes", exact: true, series: [["memory/host_peak_bytes", "process"], ["memory/device_peak_bytes", "device"]] },
];
const FLAT = 1e-3; // share of its largest value within which a curve says nothing that the value does not
const cursors = []; // of every chart: moved together
let smoothing = 0.8;

// One chart's lines, held-out ones first: colour says the run where there are several, else the metric; then the dash says the metric.
function linesOf(spec) {
  const lines = [];
  RUNS.forEach((run, r) => {
    const many = RUNS.length > 1, held = (spec.held || []).filter(([metric]) => run.evaluations[metric]);
    held.forEach(([metric, label], h) => {
      const points = run.evaluations[metric];
      lines.push({ label: `${many ? runName(run) + " " : ""}held-out ${label}`, color: color(many ? r : h), dash: h ? "5 3" : "",
        x: points.map((p) => p[0]), y: points.map((p) => p[1]), dots: true, filled: h === 0 });
    });
    spec.series.forEach(([metric, label], m) => {
      const values = run.series[metric];
      if (!values || !known(values).length) return;
      lines.push({ label: many ? `${runName(run)}${spec.series.length > 1 ? " " + label : ""}` : label, behind: held.length > 0,
        color: color(many ? r : m + held.length), dash: many ? DASHES[m % 4] : "", x: run.iterations, y: values });
    });
  });
  return lines;
}

const flat = (lines) => lines.every((line) => {
  const values = known(line.y), top = Math.max(...values.map(Math.abs));
  return Math.max(...values) - Math.min(...values) <= Math.max(FLAT * top, 1e-6);
});

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

const LEFT = 62, RIGHT = 12, TOP = 10, BOTTOM = 38;

function chart(spec) {
  const lines = linesOf(spec), [W, H] = spec.lead && innerWidth > 700 ? [RUNS.length > 1 ? 1240 : 760, 330] : [380, 226];
  if (!lines.length) return null;
  const xs = lines.flatMap((line) => line.x), ys = lines.flatMap((line) => known(line.y));
  const x0 = xs.reduce((a, b) => Math.min(a, b)), x1 = Math.max(x0 + 1, xs.reduce((a, b) => Math.max(a, b)));
  let y0 = ys.reduce((a, b) => Math.min(a, b)), y1 = ys.reduce((a, b) => Math.max(a, b));
  const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  [y0, y1] = [y0 >= 0 && y0 <= (y1 - y0) * 0.5 ? 0 : y0 - room, y1 + room];
  const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT), Y = (y) => H - BOTTOM - ((y - y0) / (y1 - y0)) * (H - TOP - BOTTOM);
  const summary = lines.map((line) => { const v = known(line.y); return `${line.label}: from ${show(v[0])} to ${show(v[v.length - 1])}`; }).join("; ");
  const svg = make("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: "0", "aria-label": `${spec.title}, ${spec.axis}. ${summary}` });
  for (const t of ticks(y0, y1, 4)) {
    svg.append(make("svg:line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: Y(t), y2: Y(t) }));
    svg.append(make("svg:text", { x: LEFT - 5, y: Y(t) + 4, "text-anchor": "end" }, show(t)));
  }
  for (const t of ticks(x0, x1, 5).filter(Number.isInteger)) svg.append(make("svg:text", { x: X(t), y: H - BOTTOM + 15, "text-anchor": "middle" }, String(t)));
  svg.append(make("svg:text", { class: "axis-name", x: (LEFT + W - RIGHT) / 2, y: H - 5, "text-anchor": "middle" }, "iteration"),
    make("svg:text", { class: "axis-name", transform: `translate(12 ${(H - BOTTOM + TOP) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.axis));
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
        drawn.append(make("svg:path", { class: "curve", d: path(line, line.y), style: `stroke:${line.color};stroke-dasharray:${line.dash || "none"}` }));
        line.y.forEach((v, i) => drawn.append(make("svg:circle", { cx: X(line.x[i]), cy: Y(v), r: 4, style: `fill:${line.filled ? line.color : "var(--card)"};stroke:${line.color};stroke-width:2` })));
        continue;
      }
      const smoothed = smoothing > 0 && line.y.length > 20 && !spec.exact;
      if (smoothed) drawn.append(make("svg:path", { class: "raw", d: path(line, line.y), style: `stroke:${line.color}` }));
      const d = path(line, smoothed ? smooth(line.y) : line.y);
      if (line.y.length === 1) drawn.append(make("svg:circle", { cx: X(line.x[0]), cy: Y(line.y[0]), r: 3, style: `fill:${line.color}` }));
      drawn.append(make("svg:path", { class: line.behind ? "curve behind" : "curve", d, style: `stroke:${line.color};stroke-dasharray:${line.dash || "none"}` }));
    }
  };
  draw();
  const tip = make("div", { class: "tip", role: "status" });
  const card = make("figure", { class: spec.lead ? "card chart lead" : "card chart", style: "margin:0", "data-chart": spec.title },
    make("figcaption", {}, make("h3", {}, spec.title)), svg, tip);
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

const axisOf = (values) => make("div", { class: "heights" }, ...values.map((value) => make("span", {}, show(value))));

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
    make("figcaption", {}, make("h3", {}, name.replace(/^reward\//, "") + " ", make("span", { class: "unit" }, RUNS.length > 1 ? runName(run) : ""))),
    make("div", { class: "plot" }, make("span", { class: "side" }, "value"), axisOf([data.high, (data.low + data.high) / 2, data.low]), canvas,
      make("div", { class: "ends" }, ...[data.iterations[0], "iteration", data.last].map((text) => make("span", {}, String(text))))), tip);
}

// ---- completions ------------------------------------------------------------------------------------------------------------------

// The completions of one group that are shown, under its prompt; the board has the first one's move.
function groupCard(samples, board) {
  const { prompt, group } = samples[0], judged = samples.some((sample) => sample.advantage !== null);
  const card = make("article", { class: `card ${board ? "board" : "text"}` }, make("h3", {}, `group ${group}`));
  if (board) {
    const holder = make("div", { role: "img", "aria-label": board.label });
    holder.innerHTML = board.svg; // chess.svg's own markup of a parsed position
    card.append(holder, make("p", {}, board.label));
  }
  const names = [...new Set(samples.flatMap((sample) => Object.keys(sample.components)))];
  const row = (cells, kind) => make("tr", {}, ...cells.map((cell) => make(kind, {}, cell)));
  card.append(make("p", { class: "unit" }, "prompt"), make("p", { class: "mono prompt" }, prompt), make("div", { class: "scroll" }, make("table", { class: "numbers" },
    make("thead", {}, row(["completion", "reward", ...(judged ? ["advantage"] : []), ...names], "th")),
    make("tbody", {}, ...samples.map((sample) => row([make("strong", { class: "mono" }, sample.completion), show(sample.reward),
      ...(judged ? [show(sample.advantage)] : []), ...names.map((name) => show(sample.components[name]))], "td"))))));
  return card;
}

const ORDERS = {
  "by group": (a, b) => a.group - b.group,
  "highest reward first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "lowest reward first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "highest advantage first": (a, b) => (b.advantage ?? -Infinity) - (a.advantage ?? -Infinity),
  "lowest advantage first": (a, b) => (a.advantage ?? Infinity) - (b.advantage ?? Infinity),
};
const SIDES = { "any advantage": () => true, "advantage above 0": (s) => s.advantage > 0, "advantage below 0": (s) => s.advantage < 0 };

function completions(run) {
  const box = make("div");
  if (RUNS.length > 1) box.append(make("h3", {}, runName(run)));
  if (!run.samples.length) {
    box.append(make("p", { class: "hint" }, "None recorded (logging.samples_every is 0, or an older run)."));
    return box;
  }
  const boards = make("div", { class: "boards" }), count = make("span", { class: "hint", role: "status" });
  const choice = (label, options) => make("select", { "aria-label": `${label} of the completions of ${runName(run)}` },
    ...options.map((text, i) => make("option", { value: i }, text)));
  const iteration = choice("Iteration", run.samples.map((record) => `iteration ${record.iteration}`));
  const groups = [...new Set(run.samples.flatMap((record) => record.samples.map((sample) => sample.group)))].sort((a, b) => a - b);
  const group = choice("Group", ["all groups", ...groups.map((g) => `group ${g}`)]), order = choice("Order", Object.keys(ORDERS));
  const side = choice("Advantage", Object.keys(SIDES));
  const least = make("input", { type: "number", step: "any", placeholder: "reward from", "aria-label": `Least reward of the completions of ${runName(run)}` });
  const fill = () => {
    const all = run.samples[iteration.value].samples;
    const shown = all.filter((s) => (group.value === "0" || s.group === groups[group.value - 1]) && Object.values(SIDES)[side.value](s)
      && (least.value === "" || s.reward >= Number(least.value))).sort(Object.values(ORDERS)[order.value]);
    count.textContent = ` ${shown.length} of ${all.length}`;
    const cards = new Map(); // in the order of their first completions
    for (const sample of shown) cards.set(sample.group, [...(cards.get(sample.group) || []), sample]);
    const boardOf = (g) => all.find((s) => s.group === g).board; // of the group's first one
    boards.replaceChildren(...[...cards].map(([g, samples]) => groupCard(samples, boardOf(g))));
  };
  iteration.value = run.samples.length - 1;
  const controls = [iteration, group, order, ...(run.samples.some((r) => r.samples.some((s) => s.advantage !== null)) ? [side] : []), least];
  controls.forEach((control) => control.addEventListener("input", fill));
  fill();
  box.append(make("div", { class: "controls" }, ...controls, count), boards);
  return box;
}

// ---- head, health, time, settings ---------------------------------------------------------------------------------------------------

const lastTen = (run, metric) => mean(known((run.series[metric] || []).slice(-10)));
const firstTen = (run, metric) => mean(known((run.series[metric] || []).slice(0, 10)));
const seconds = (run) => known(run.series["time/iteration"] || []).reduce((a, b) => a + b, 0) * run.step;

function facts(run) {
  return [["iterations", String(run.iterations[run.iterations.length - 1] + 1)], ["task", run.config["task.name"]],
    ["weights", run.config["model.weights"]], ["iterations took", duration(seconds(run))]].filter(([, value]) => value !== undefined);
}

// [label, start, end] of a run; held-out scores first, the reward's above all.
const ORDER = (name) => (name.endsWith("/reward") ? 0 : 1);
const HELD_OUT = [...new Set(RUNS.flatMap((run) => Object.keys(run.evaluations)))].sort((a, b) => ORDER(a) - ORDER(b) || a.localeCompare(b));
const TRAINED = [["reward/mean", "training reward"], ["legal_move_rate", "legal moves"], ["kl/mean", "KL, nats per token"], ["entropy", "entropy, nats per token"],
  ["completion_length/mean", "completion length, tokens"], ["time/iteration", "seconds an iteration"]];
const SCORES = [
  ...HELD_OUT.map((name) => ({ label: `held-out ${name.split("/").slice(2).join("/")}, ${name.split("/")[1]}`, main: ORDER(name) === 0,
    of: (run) => { const p = run.evaluations[name]; return p ? [p[0][1], p[p.length - 1][1]] : [null, null]; } })),
  ...TRAINED.map(([name, label]) => ({ label: `${label}, mean of ten`, main: true, of: (run) => [firstTen(run, name), lastTen(run, name)] })),
].filter((score) => RUNS.some((run) => score.of(run)[1] !== null));
const signed = (value) => (value > 0 ? "+" : "") + show(value);

// Of one run from the start to the end; of several the ends, and how each differs from the first run's.
function scores() {
  const many = RUNS.length > 1, ends = RUNS.map((run) => `${runName(run)}, after ${run.iterations[run.iterations.length - 1] + 1}`);
  const head = many ? ["", ...ends, ...RUNS.slice(1).map((run) => `${runName(run)} − ${runName(RUNS[0])}`)] : ["", "start", "end", "change"];
  const row = (score) => {
    const pairs = RUNS.map(score.of), first = many ? pairs[0][1] : pairs[0][0], change = (value) => (value === null || first === null ? "–" : signed(value - first));
    const cells = many ? [...pairs.map((p) => show(p[1])), ...pairs.slice(1).map((p) => change(p[1]))] : [show(first), show(pairs[0][1]), change(pairs[0][1])];
    return make("tr", {}, make("th", { scope: "row" }, score.label), ...cells.map((cell) => make("td", {}, cell)));
  };
  const tableOf = (some) => make("div", { class: "scroll" }, make("table", { class: "numbers", "data-table": "scores" },
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...some.map(row))));
  const rest = SCORES.filter((score) => !score.main);
  const asked = ["evaluation.positions", "evaluation.source", "prompts.source", "task.name"];
  const apart = asked.filter((key) => new Set(RUNS.map((run) => run.config[key])).size > 1);
  return make("div", { class: "card" }, make("h3", {}, many ? "Final scores" : "From start to end"),
    apart.length ? make("p", { class: "hint" }, `Not of the same held-out prompts: ${apart.join(", ")} differ.`) : null, tableOf(SCORES.filter((score) => score.main)),
    rest.length ? make("details", {}, make("summary", {}, `Held-out components (${rest.length})`), tableOf(rest)) : null);
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
    const marks = ticks(0, total, 5).filter((t) => t <= total);
    box.append(make("div", { class: "bar", role: "img", "aria-label": words }, ...parts.map(([name, s, c]) => make("span", { style: `width:${(100 * s) / total}%;background:${c}`, title: `${name}: ${show(s)} s` }))),
      make("div", { class: "scale", "aria-hidden": "true" }, ...marks.map((t) => make("span", { style: `left:${(100 * t) / total}%` }, `${show(t)} s`))),
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
  RUNS.forEach((run, r) => byId("runs").append(make("li", { class: "card" },
    RUNS.length > 1 ? make("div", { class: "name" }, make("i", { class: "swatch", style: `border-color:${color(r)}` }), runName(run)) : null,
    make("dl", { class: "facts" }, ...facts(run).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))))));
  for (const run of RUNS) for (const finding of run.health)
    byId("health").append(make("p", { class: "finding" }, `${RUNS.length > 1 ? runName(run) + ", " : ""}iteration ${finding.iteration}: ${finding.line}`));
  const watched = RUNS.filter((run) => !run.missing.includes("health.jsonl"));
  if (watched.length && !RUNS.some((run) => run.health.length)) byId("health").append(make("p", { class: "healthy" }, "✓ The health checks found nothing wrong."));
  byId("result").classList.toggle("many", RUNS.length > 1);
  byId("result").append(...[chart(REWARD), scores()].filter(Boolean));
  const drawn = [[], []]; // those that move, and those that do not
  for (const spec of CHARTS) { const lines = linesOf(spec); if (lines.length) drawn[Number(flat(lines))].push([chart(spec), spec, lines]); }
  byId("charts").append(...drawn[0].map(([node]) => node));
  const still = drawn[1].map(([, spec, lines]) => `${spec.title} ${show(known(lines[0].y).at(-1))}`).join("; ");
  if (still) byId("flat").append(make("summary", {}, `Flat (${drawn[1].length}): `, make("span", { class: "unit" }, still)), make("div", { class: "grid" }, ...drawn[1].map(([node]) => node)));
  else byId("flat").remove();
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
