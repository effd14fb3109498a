"use strict";
// What the page asks for, and where it shows it. A run's own words enter as text nodes and properties, nothing as HTML.
const EVERY_MS = 2000, BUCKETS = 180;
const state = { run: null, lines: -1, range: null, smoothing: 0, log: false, lanes: null, cards: new Map() };

async function ask(route, values = {}) {
  const response = await fetch(`/api/${route}?${new URLSearchParams(values)}`);
  const kind = response.headers.get("Content-Type") ?? "";
  const answer = kind.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const range = () => state.range ? { first: state.range[0], last: state.range[1] } : {};
const failed = (place, error) => place.replaceChildren(el("p", { className: "bad", textContent: plain(error.message) }));

// ---- what is in view is loaded, and again when there is more of it ----

const inView = new Set();
const watcher = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target) : inView.delete(target);
  load();
}, { rootMargin: "200px" });

/** Loads what is in view, and older than what is there; `what` is a card, or a section with `load` and `stamp`. */
async function load() {
  const wanted = [...inView].map(target => target.shows).filter(shows => shows && shows.stamp !== stampOf(shows));
  for (const shows of wanted) shows.stamp = stampOf(shows);
  const cards = wanted.filter(shows => shows.keys), others = wanted.filter(shows => !shows.keys);
  const jobs = others.map(shows => shows.load().then(() => shows.errors.replaceChildren(), error => failed(shows.errors, error)));
  if (cards.length) jobs.push(loadCards(cards));
  await Promise.all(jobs);
}

const stampOf = shows => shows.keys ? `${state.lines} ${state.range} ${state.smoothing}` : shows.stampNow?.() ?? String(state.lines);

function section(id, load, stampNow) {
  const shows = $(id).shows = { load, stampNow, errors: el("div") };
  $(id).append(shows.errors);
  watcher.observe($(id));
  return shows;
}

// ---- curves ----

const STATISTICS = { mean: 0, median: 2, max: 1, min: 3 };

async function loadCards(cards) {
  const keys = [...new Set(cards.flatMap(card => card.keys))];
  try {
    const answer = await ask("curves", { keys, buckets: BUCKETS, smoothing: state.smoothing, ...range() });
    for (const card of cards) {
      card.picture.series = ["run", "other"].flatMap(whose => card.keys.filter(key => answer[whose][key]).map((key, i) => ({
        ...answer[whose][key], dashed: whose === "other" && card.keys.length > 1, label: labelOf(card, key, whose),
        colour: card.keys.length > 1 ? COLOURS[STATISTICS[key.split("/").at(-1)] ?? i] : COLOURS[whose === "run" ? 0 : 1] })));
      draw(card);
    }
  } catch (error) {
    for (const card of cards) failed(card.legend, error);
  }
}

/** Of one key the run's name, where there are two; of several what each is, and that the other run is dashed. */
function labelOf(card, key, whose) {
  if (card.keys.length > 1) return key.slice(card.title.length + 1) + (whose === "other" ? ` of ${state.run.compare}` : "");
  return state.run.compare ? (whose === "run" ? state.run.name : state.run.compare) : "";
}

function draw(card) {
  card.picture.log = state.log;
  card.picture.draw();
  const { series } = card.picture, keys = series.filter(one => one.label && !one.dashed).map(one => keyOf(one.colour, one.label));
  if (series.some(one => one.dashed)) keys.push(el("span", { textContent: `dashed: ${plain(state.run.compare)}` }));
  card.legend.replaceChildren(...keys);
}

function keyOf(name, text) {
  const mark = el("i");
  mark.style.background = `var(${name})`;
  return el("span", {}, mark, plain(text));
}

function makeCard(chart) {
  const canvas = el("canvas"), legend = el("div", { className: "keys" }), what = chart.what || "a metric that the registry does not know";
  const made = el("div", { className: "card" }, el("h4", { textContent: chart.title + (chart.unit ? `, ${chart.unit}` : "") }),
    el("p", { textContent: what, title: [what, chart.when].filter(Boolean).join("; there with: ") }), canvas, legend);
  const picture = new Lines(canvas, { xLabel: chart.axis, ranged: chosen => zoomTo(chosen) });
  made.shows = { ...chart, picture, legend, element: made };
  watcher.observe(made);
  return made;
}

function zoomTo(chosen) {
  state.range = chosen;
  $("zoom").textContent = chosen ? `steps ${Math.ceil(chosen[0])} to ${Math.floor(chosen[1])}; a double click shows all` : "Dragging over a curve chooses a range of steps, a double click all.";
  load();
}

/** One card for each chart of `wanted` in a place; those that are there stay. */
function fill(place, wanted, id) {
  const had = state.cards.get(id) ?? new Map(), now = new Map();
  for (const chart of wanted) {
    const card = had.get(chart.title);
    now.set(chart.title, card && card.shows.keys.join() === chart.keys.join() ? card : makeCard(chart));
  }
  for (const [title, card] of had) if (now.get(title) !== card) { watcher.unobserve(card); inView.delete(card); }
  state.cards.set(id, now);
  const cards = [...now.values()];
  if (cards.length !== place.children.length || cards.some((card, i) => place.children[i] !== card)) place.replaceChildren(...cards);
}

function showCharts() {
  const charts = state.run.charts, words = $("filter").value.trim().toLowerCase();
  const groups = Map.groupBy ? Map.groupBy(charts, chart => chart.group) : charts.reduce((all, c) => all.set(c.group, [...(all.get(c.group) ?? []), c]), new Map());
  for (const [name, those] of groups) {
    let group = [...$("groups").children].find(each => each.dataset.group === name);
    if (!group) {
      group = el("details", { open: true }, el("summary"), el("div", { className: "cards" }));
      group.dataset.group = name;
      $("groups").append(group);
    }
    const chosen = those.filter(chart => chart.title.toLowerCase().includes(words));
    group.hidden = !chosen.length;
    group.firstChild.textContent = `${plain(name)} (${chosen.length})`;
    fill(group.lastChild, chosen, `group ${name}`);
  }
  part("stale", charts.filter(chart => /stale|older_version|multi_version|offpolicy/.test(chart.title)), "No metrics of it: every sample was made by the weights that trained on it.");
  part("evals", charts.filter(chart => chart.group === "eval" && ["reward", "chance"].includes(chart.unit)), "No evaluations yet (--eval-interval).");
}

function part(id, charts, otherwise) {
  const place = $(id).querySelector(".cards");
  fill(place, charts, id);
  let note = $(id).querySelector(".none");
  if (!note) place.before(note = el("p", { className: "none soft" }));
  note.textContent = charts.length ? "" : otherwise;
}

// ---- the top of the page ----

async function look() {
  const run = await ask("run");
  const changed = run.lines !== state.lines || JSON.stringify(run.verdict) !== JSON.stringify(state.run?.verdict);
  state.run = run;
  $("problem").hidden = !run.broken;
  $("problem").textContent = `${run.broken} lines of metrics.jsonl are left out: they are no metrics, as a crash leaves them.`;
  if (!changed) return;
  state.lines = run.lines;
  document.title = $("name").textContent = plain(run.name);
  $("name").title = run.path;
  const [, last, count] = run.steps ?? [0, 0, 0], of = finite(run.of) ? ` of ${run.of}` : "";
  $("status").textContent = [run.steps ? `step ${last + 1}${of}, ${count} complete` : "no step is complete yet", run.compare && `compared to ${plain(run.compare)}`, run.follow && "following"].filter(Boolean).join(" · ");
  $("reader").hidden = !run.dumps;
  $("tiles").replaceChildren(...run.head.map(tile));
  showVerdict(run.verdict);
  showCharts();
  load();
}

function tile({ key, value, what, unit }) {
  const made = el("button", { className: "tile", title: what }, el("b", { textContent: short(value) + (unit === "s" ? " s" : "") }), el("span", { textContent: plain(key) }));
  made.onclick = () => showKey(key);
  return made;
}

function showKey(key) {
  $("filter").value = "";
  showCharts();
  const card = [...document.querySelectorAll("#groups .card")].find(each => each.shows.keys.includes(key));
  document.querySelector(".card.at")?.classList.remove("at");
  if (!card) return;
  card.closest("details").open = true;
  card.classList.add("at");
  card.scrollIntoView({ block: "center" });
}

function showVerdict(verdict) {
  $("verdict").hidden = !verdict;
  if (!verdict) return;
  const sentences = verdict.sentences.map(({ sentence, keys }) => el("p", {}, plain(sentence), ...keys.flatMap(key => {
    const link = el("a", { href: "#curves", textContent: plain(key) });
    link.onclick = event => { event.preventDefault(); showKey(key); };
    return [" ", link];
  })));
  $("verdict").replaceChildren(el("p", {}, el("strong", { textContent: `Is it learning? ${plain(verdict.verdict)}` })), ...sentences);
}

// ---- phases ----

const bands = new Bands($("bands"), { ranged: chosen => { state.bands = chosen; load(); }, picked: px => {
  const x = bands.data.x[bands.bucket(px)];
  showStep(x);
} });

/** Whether rewards or tools bound a rollout is in the trace, for which the picture does not wait the first time. */
async function loadPhases() {
  if (!bands.data) await showPhases();
  await ask("traces");
  await showPhases();
}

async function showPhases() {
  const [first, last] = state.bands ?? [null, null], width = $("bands").clientWidth || 900;
  const data = bands.data = await ask("phases", { buckets: Math.min(400, Math.round(width / 3)), ...(state.bands ? { first, last } : {}) });
  $("legend").replaceChildren(...Object.keys(data.seconds).map((name, i) => keyOf(COLOURS[i], name)));
  const counts = Object.entries(data.bound_by).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${count}`);
  $("bound").textContent = data.sentence + (counts.length ? ` Steps by what bounds them: ${counts.join(", ")}.` : "No step is complete yet.");
  bands.draw();
}

async function showStep(step) {
  try {
    const answer = await ask("step", { step });
    bands.chosen = step;
    bands.draw();
    $("step").className = "";
    $("step").textContent = `Step ${step}: ${answer.sentence}`;
    state.lanes = [step, step];
    load();
  } catch (error) {
    failed($("step"), error);
  }
}

// ---- lanes and memory ----

const lanePicture = new Lanes($("lanes"), { bottom: 18, ranged: chosen => { lanePicture.zoom = chosen; lanePicture.draw(); } });

async function loadLanes() {
  const { rollouts, broken } = await ask("traces");
  if (!rollouts) { $("lanesabout").textContent = "The run has no trace of a rollout yet."; return; }
  const newest = Math.min(rollouts[1], state.run.steps?.[1] ?? Infinity); // the last whole one
  const [first, last] = state.lanes ?? [newest, newest];
  Object.assign($("first"), { value: first, max: rollouts[1] });
  Object.assign($("last"), { value: last, max: rollouts[1] });
  const data = await ask("lanes", { first, last });
  Object.assign(lanePicture, { data, zoom: null });
  $("lanes").style.height = `${Lanes.height(data)}px`;
  const out = [data.left_out && `the ${data.left_out.toLocaleString()} shortest spans are left out`, broken && `${broken} broken lines are left out`].filter(Boolean);
  $("lanesabout").textContent = [`of ${rollouts[0]} to ${rollouts[1]}; ${short(data.seconds)} s`, ...out].join("; ");
  lanePicture.draw();
  $("names").replaceChildren(...data.names.map((name, i) => { const key = keyOf("", name); key.firstChild.style.background = lanePicture.colourOf(i); return key; }));
}

function toRollouts(first, last) {
  state.lanes = first < 0 ? [0, Math.max(0, last - first)] : [first, Math.max(first, last)];
  load();
}

const minutes = seconds => seconds < 600 ? `${short(seconds)} s` : seconds < 36000 ? `${short(seconds / 60)} min` : `${short(seconds / 3600)} h`;

async function loadMemory() {
  await ask("traces");
  const { run } = await ask("memory", { buckets: BUCKETS }), kinds = new Map();
  for (const [key, points] of Object.entries(run)) {
    const [kind, role] = key.split("/");
    if (kind !== "total") kinds.set(kind, [...(kinds.get(kind) ?? []), { ...points, label: role, colour: COLOURS[(kinds.get(kind)?.length ?? 0) % COLOURS.length] }]);
  }
  $("nomemory").textContent = kinds.size ? "GiB after each phase of a training rank: of the host by its process; of its GPU what tensors have allocated, their peak in the phase, what torch has reserved, and what all processes use." : "No phase of a training rank is complete yet.";
  const place = $("memory").querySelector(".cards");
  for (const [kind, series] of kinds) {
    let card = [...place.children].find(each => each.dataset.kind === kind);
    if (!card) {
      card = el("div", { className: "card" }, el("h4", { textContent: `${plain(kind)}, GiB` }), el("canvas"), el("div", { className: "keys" }));
      card.dataset.kind = kind;
      card.picture = new Lines(card.querySelector("canvas"), { xLabel: "after", xText: minutes, whole: false });
      place.append(card);
    }
    card.picture.series = series;
    card.picture.draw();
    card.lastChild.replaceChildren(...series.map(one => keyOf(one.colour, one.label)));
  }
}

// ---- rewards ----

const groupDots = new Dots($("groupdots")), lengthDots = new Dots($("lengthdots"));
const toReader = (rollout, place) => `/rollouts#${new URLSearchParams(place === undefined ? { rollout } : { rollout, place })}`;

function options(select, values, chosen) {
  if (values.join() !== [...select.options].map(option => option.value).join()) select.replaceChildren(...values.map(value => el("option", { value, textContent: plain(value) })));
  select.value = chosen;
}

async function loadRewards() {
  const saved = Boolean(state.run.dumps);
  $("pictures").hidden = $("rollout").hidden = $("open").hidden = !saved;
  if (!saved) { $("about").textContent = "The run saves no rollouts: start one with --dump-details DIR, or --save-debug-rollout-data."; return; }
  if (!groupDots.dots) $("about").textContent = "Reading the saved rollout…";
  const data = await ask("rewards", { rollout: state.rollout ?? "", reward_key: state.rewardKey ?? "" });
  options($("rollout"), data.names, data.name);
  $("rewardkey").hidden = !data.reward_keys.length;
  options($("rewardkey"), data.reward_keys, data.reward_key);
  $("open").href = toReader(data.name);
  const evaluated = data.names.filter(name => name.startsWith("eval_"));
  $("evalfiles").replaceChildren(...(evaluated.length ? ["Saved samples: ", ...evaluated.slice(-30).flatMap(name => [el("a", { href: toReader(name), target: "_blank", textContent: plain(name) }), " "])] : []));
  const list = counts => Object.entries(counts).map(([name, count]) => `${plain(name)} ${count}`).join(", ");
  $("about").textContent = [`${data.zero_variance} of ${data.several} groups teach nothing: all their rewards are equal`, `mean reward ${short(data.mean)}`,
    data.without_reward && `${data.without_reward} samples without a reward`, list(data.statuses), `samples by version of the weights: ${list(data.versions)}`].filter(Boolean).join(" · ");
  const opens = place => () => open(toReader(data.name, place), "_blank");
  groupDots.dots = data.groups.map((group, i) => ({ x: i, y: group.mean, low: group.least, high: group.largest, open: opens(group.place),
    colour: group.samples > 1 && group.least === group.largest ? "--bad" : "--c0",
    lines: [`group ${plain(group.group)}, ${group.samples} samples`, `reward ${short(group.least)}, mean ${short(group.mean)}, ${short(group.largest)}`] }));
  const where = new Map(); // many samples are at one point
  for (const [x, y, place] of data.points) {
    const dot = where.get(`${x} ${y}`) ?? { x, y, colour: "--c0", count: 0, open: opens(place) };
    dot.count++;
    dot.lines = [`${x} tokens, reward ${short(y)}`, dot.count > 1 ? `${dot.count} samples` : `sample ${place}`];
    where.set(`${x} ${y}`, dot);
  }
  lengthDots.dots = [...where.values()];
  groupDots.draw();
  lengthDots.draw();
}

// ---- warnings and faults ----

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map(textContent => el("th", { textContent })));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

async function loadFaults() {
  const { events, count, warnings } = await ask("faults");
  const row = (cells, className, long) => el("tr", {}, ...cells.map((cell, i) => el("td", { className: i === 1 ? className : i === long ? "long" : "" }, cell instanceof Node ? cell : plain(cell ?? ""))));
  const faults = events.toReversed().map(event => row([new Date(event.time * 1000).toLocaleString("sv-SE"), event.kind, event.subject, event.phase,
    [event.cause, event.action].filter(Boolean).join(" → "), event.seconds === null ? "" : `${event.seconds} s`], event.kind.endsWith("_back") ? "good" : "bad", 4));
  const said = warnings.toReversed().map(each => {
    const text = el("span", {}, plain(each.text) + (each.times > 1 ? `  (${each.times} times)` : ""));
    if (each.details.length) text.append(el("details", {}, el("summary", { textContent: "more" }), el("pre", { textContent: plain(each.details.join("\n")) })));
    return row([each.time, each.level, each.role, text], each.level === "WARNING" ? "warn" : "bad", 3);
  });
  $("events").replaceChildren(el("p", { textContent: count ? `Faults: ${count}${count > events.length ? `, the last ${events.length}` : ""}` : "No faults." }), ...(count ? [table(["time", "what", "whom", "phase", "cause and what was done", ""], faults)] : []));
  $("warnings").replaceChildren(el("p", { textContent: said.length ? "The last warnings and errors of all logs, by their own clocks" : "No warnings in the logs." }), ...(said.length ? [table(["time", "level", "log", "message"], said)] : []));
}

// ---- what the reader does ----

function redraw() {
  colours.clear();
  const started = performance.now();
  for (const canvas of document.querySelectorAll("canvas")) if (canvas.picture && canvas.getBoundingClientRect().bottom > 0 && canvas.getBoundingClientRect().top < innerHeight) canvas.picture.draw();
  return performance.now() - started;
}

let waiting;
const soon = (what, delay = 150) => { clearTimeout(waiting); waiting = setTimeout(what, delay); };
$("filter").oninput = () => soon(() => { showCharts(); load(); });
$("smoothing").oninput = () => { state.smoothing = Number($("smoothing").value); $("weight").textContent = state.smoothing; soon(load); };
$("log").onchange = () => { state.log = $("log").checked; for (const canvas of document.querySelectorAll(".card canvas")) Object.assign(canvas.picture, { log: state.log }); redraw(); };
$("first").onchange = () => toRollouts(Number($("first").value), Math.max(Number($("first").value), Number($("last").value)));
$("last").onchange = () => toRollouts(Math.min(Number($("first").value), Number($("last").value)), Number($("last").value));
$("before").onclick = () => { const by = Number($("last").value) - Number($("first").value) + 1; toRollouts(Number($("first").value) - by, Number($("last").value) - by); };
$("after").onclick = () => { const by = Number($("last").value) - Number($("first").value) + 1; toRollouts(Number($("first").value) + by, Number($("last").value) + by); };
$("rollout").onchange = () => { state.rollout = $("rollout").value; load(); };
$("rewardkey").onchange = () => { state.rewardKey = $("rewardkey").value; load(); };
$("theme").onclick = () => {
  const root = document.documentElement.style, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.colorScheme = root.colorScheme ? "" : system === "dark" ? "light" : "dark";
  redraw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => soon(redraw, 50));
document.addEventListener("keydown", event => {
  if (event.key === "/" && !event.target.matches("input, select")) { event.preventDefault(); $("filter").focus(); }
});

async function start() {
  await look();
  section("phases", loadPhases, () => `${state.lines} ${state.bands}`);
  section("lane", loadLanes, () => String(state.lanes ?? state.lines));
  section("memory", loadMemory);
  section("rewards", loadRewards, () => `${state.rollout} ${state.rewardKey} ${state.rollout ? "" : state.lines}`);
  section("faults", loadFaults);
  while (state.run.follow) {
    await new Promise(done => setTimeout(done, EVERY_MS));
    try {
      if (!document.hidden) await look();
    } catch (error) {
      $("status").textContent = plain(`the server does not answer: ${error.message}`);
      state.lines = -1;
    }
  }
}
start().catch(error => failed($("overview"), error));
