// The yard: the scheduler's lines, blocks and steps, live or at a moment of the last minute.

import { colourOf, drawBlocks, drawStrip, paletteOf } from "./draw.js";
import { chromeTrace, requestLines, stepLines } from "./files.js";
import { openWhatIf, startWhatIf } from "./whatif.js";
import { History } from "./history.js";
import { copy, download, element } from "./net.js";
import { lifeInWords, many, nameOf, preemptionWords, reasonOf, span } from "./words.js";

const byId = (id) => document.getElementById(id);
const history = new History();
const state = { paused: null, selected: null, tenant: "", priority: "", palette: null, atStrip: () => null, atBlock: () => null, isScheduled: false };

const nameById = (id) => nameOf(history.lives.get(id) || { id, request: "" });
const fits = (life) => (!state.tenant || life?.tenant === state.tenant) && (state.priority === "" || String(life?.priority) === state.priority);

// Views come in.

export function takeView(view, pulse) {
  byId("yard-note").hidden = true;
  history.take(view);
  const { num_running: running, num_waiting: waiting, num_swapped: swapped } = view.stats;
  pulse("live", running + waiting + swapped ? `${running} running · ${waiting + swapped} waiting` : "idle");
  if (!byId("yard").hidden) drawSoon();
}

export function yardIsClosed(reason) {
  byId("yard-note").hidden = false;
  byId("yard-note").textContent = reason;
}

function drawSoon() {
  if (state.isScheduled) return;
  state.isScheduled = true;
  requestAnimationFrame(() => { state.isScheduled = false; draw(); });
}

// The moment that is shown: the newest view, or the one that the slider is at.
function shownView() {
  if (state.paused === null) return history.frames.at(-1);
  return history.frames.findLast((frame) => frame.time_s <= state.paused) ?? history.frames[0];
}

function draw() {
  const view = shownView();
  if (!view || byId("yard").hidden) return;
  state.palette ??= paletteOf();
  const steps = history.stepsUntil(view.time_s);
  drawScrub(view);
  drawGauges(view, steps);
  drawFilters(view);
  state.atStrip = drawStrip(byId("strip"), steps, state.palette, state.selected);
  state.atBlock = drawBlocks(byId("blocks"), view.blocks, view.stats.num_blocks, state.palette, { selected: state.selected, isShown: (id) => fits(history.lives.get(id)) });
  byId("step-note").textContent = history.numDropped ? `${many(history.numDropped, "step")} not shown: faster than the view` : "";
  byId("blocks-note").textContent = `${view.stats.num_used_blocks.toLocaleString("en")} of ${view.stats.num_blocks.toLocaleString("en")} used, ${view.block_size} tokens each${groupWords(view.groups)}`;
  drawRunning(view);
  drawWaiting(view);
  drawLife(view);
  drawEvents(view);
}

// Blocks of each group of layers, where there are several.
function groupWords(groups) {
  return groups.length > 1 ? groups.map(([name, held]) => `; ${held.toLocaleString("en")} for ${name}`).join("") : "";
}

function drawScrub(view) {
  const scrub = byId("scrub");
  scrub.max = history.frames.length - 1;
  scrub.value = history.frames.indexOf(view);
  byId("scrub-value").textContent = state.paused === null ? "live" : `${(history.frames.at(-1).time_s - view.time_s).toFixed(1)} s ago`;
  byId("pause").textContent = state.paused === null ? "Pause" : "Go on";
  byId("pause").setAttribute("aria-pressed", String(state.paused !== null));
}

function drawGauges(view, steps) {
  const stats = view.stats;
  const recent = steps.filter((step) => step.time_s > view.time_s - 2);
  const perSecond = (of) => recent.reduce((sum, step) => sum + of(step), 0) / 2;
  const busy = Math.min(100, 100 / (view.num_engines ?? 1) * perSecond((step) => step.schedule_s + step.execute_s + step.update_s));
  const hits = stats.num_prefix_queries ? Math.round(100 * stats.num_prefix_hits / stats.num_prefix_queries) : 0;
  const rows = [
    ["Running", stats.num_running, `of ${view.max_num_seqs}`], ["Waiting", stats.num_waiting, stats.num_swapped ? `+ ${stats.num_swapped} swapped` : ""],
    ["KV cache", `${Math.round(100 * stats.num_used_blocks / Math.max(stats.num_blocks, 1))}`, "%"], ["Decoded", Math.round(perSecond((step) => step.num_decodes)), "tokens/s"],
    ["Prefilled", Math.round(perSecond((step) => step.num_tokens - step.num_decodes)), "tokens/s"], ["Busy", Math.round(busy), "%"],
    ["Preemptions", stats.num_preemptions, `${stats.num_recomputed_tokens.toLocaleString("en")} redone`], ["Prefix hits", hits, "%"]];
  const gauges = byId("gauges");
  if (gauges.children.length !== rows.length) gauges.replaceChildren(...rows.map(() => element("div", {}, element("dt"), element("dd", {}, element("span"), " ", element("small")))));
  rows.forEach(([name, value, unit], place) => {
    const [dt, dd] = gauges.children[place].children;
    dt.textContent = name;
    dd.firstChild.textContent = value.toLocaleString("en");
    dd.lastChild.textContent = unit;
  });
}

function drawFilters(view) {
  const all = [...view.running, ...view.waiting];
  fillSelect(byId("tenant-filter"), new Set(all.map((report) => report.tenant).filter(Boolean)));
  fillSelect(byId("priority-filter"), new Set(all.map((report) => String(report.priority))));
}

// Filters only grow: a choice must not vanish while a reader looks for it.
function fillSelect(select, values) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value) && known.size < 100) select.append(element("option", { value, textContent: value }));
}

// Lines keep the element of each request, so that the focus stays where it is.
function drawLine(list, reports, fill, empty) {
  const old = new Map([...list.children].map((item) => [item.dataset.id, item]));
  const items = reports.map((report) => {
    const id = String(report.sequence_id);
    const item = old.get(id) || newItem(report.sequence_id);
    item.setAttribute("aria-current", String(state.selected === report.sequence_id));
    fill(item, report);
    return item;
  });
  if (!items.length) items.push(element("div", { className: "empty", textContent: empty }));
  items.forEach((item, place) => { if (list.children[place] !== item) list.insertBefore(item, list.children[place] || null); });
  while (list.children.length > items.length) list.lastElementChild.remove();
}

function newItem(id) {
  const item = element("div", { tabIndex: 0, role: "button" }, element("span", { className: "swatch" }), element("span", { className: "name" }), element("span"), element("span", { className: "what" }));
  item.dataset.id = id;
  item.style.setProperty("--hue", colourOf(id, state.palette.isDark));
  item.addEventListener("click", () => select(id));
  item.addEventListener("keydown", (event) => { if (event.key === "Enter") select(id); });
  return item;
}

function fillName(cell, report) {
  const small = [report.priority ? `priority ${report.priority}` : "", report.tenant].filter(Boolean).join(" · ");
  cell.replaceChildren(nameById(report.sequence_id), " ", element("small", { textContent: small }));
}

function drawRunning(view) {
  const shown = view.running.filter((report) => fits(history.lives.get(report.sequence_id)));
  const most = Math.max(...view.running.map((report) => report.num_blocks), 1);
  byId("running-note").textContent = shown.length ? "in rank order; the last one pays" : "";
  drawLine(byId("running"), shown, (item, report) => {
    const [, name, bar, what] = item.children;
    fillName(name, report);
    bar.className = "bar";
    if (!bar.children.length) bar.append(element("i"), element("i"));
    bar.children[0].style.width = `${100 * report.num_blocks / most}%`;
    bar.children[1].style.width = `${Math.min(100, 100 * report.num_computed_tokens / (most * view.block_size))}%`;
    const isPrefill = report.num_computed_tokens < report.num_prompt_tokens;
    const away = report.num_preemptions ? ` ↩${report.num_preemptions}` : "";
    what.textContent = `${isPrefill ? `prompt ${Math.floor(100 * report.num_computed_tokens / report.num_prompt_tokens)} %` : `${report.num_output_tokens} tok`} · ${many(report.num_blocks, "block")}${away}`;
  }, "Nothing runs.");
}

function drawWaiting(view) {
  const shown = view.waiting.filter((report) => fits(history.lives.get(report.sequence_id)));
  const more = view.stats.num_waiting + view.stats.num_swapped - view.waiting.length;
  byId("waiting-note").textContent = shown.length ? `by rank${more > 0 ? `; ${more} more behind` : ""}; ≈ start, as the last starts were apart` : "";
  drawLine(byId("waiting"), shown, (item, report) => {
    const [, name, why, what] = item.children;
    fillName(name, report);
    why.className = report.num_preemptions ? "why sent-away" : "why";
    why.textContent = reasonOf(report, view);
    const expected = report.expected_start_s === null ? "" : ` · ≈ ${span(report.expected_start_s)}`;
    what.textContent = `${span(report.age_s)}${expected}`;
  }, "No request waits.");
}

function drawLife(view) {
  const life = history.lives.get(state.selected);
  if (!life) return;
  const report = [...view.running, ...view.waiting].find((each) => each.sequence_id === state.selected);
  const text = lifeInWords(life, report, view, nameById);
  if (byId("life").textContent !== text) byId("life").textContent = text;
}

function drawEvents(view) {
  const shown = history.events.filter((event) => event.time_s <= view.time_s && fits(history.lives.get(event.sequence_id))).slice(-30).reverse();
  byId("events").replaceChildren(...(shown.length ? shown.map((event) => element("li", {}, element("time", { textContent: `−${(view.time_s - event.time_s).toFixed(1)} s` }), preemptionWords(event, nameById)))
    : [element("li", { className: "empty", textContent: "None in the last minute." })]));
}

// The reader acts.

function select(id) {
  state.selected = state.selected === id ? null : id;
  if (state.selected === null) byId("life").textContent = "The history of a request is shown here.";
  draw();
}

function togglePause() {
  state.paused = state.paused === null ? history.frames.at(-1)?.time_s ?? null : null;
  draw();
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

function stepWords(column) {
  if (!column) return "";
  if (column.isGap) return "steps that were too many for the view";
  if (!column.step) return `idle for ${span(column.idleMs / 1000)}`;
  const { step, ms } = column;
  const lines = [`Step ${step.step}: ${ms.toFixed(1)} ms`, `${many(step.num_tokens - step.num_decodes, "prompt token")}, ${many(step.num_decodes, "decode")}`,
    `${step.num_running} running, ${step.num_waiting} waiting, ${step.num_used_blocks} of ${step.num_blocks} blocks`];
  for (const event of step.preemptions) lines.push(preemptionWords(event, nameById));
  return lines.join("\n");
}

function blockWords(cell) {
  if (!cell) return "";
  const where = cell.perCell > 1 ? `Blocks ${cell.first + 1} to ${cell.first + cell.perCell}` : `Block ${cell.block + 1}`;
  return `${where}: ${["free", "free, content kept for a prefix", `of ${nameById(cell.owner)}`, `shared, first by ${nameById(cell.owner)}`][cell.use]}`;
}

function startPictures() {
  const strip = byId("strip"), blocks = byId("blocks");
  strip.addEventListener("mousemove", (event) => showTip(event, stepWords(state.atStrip(event.offsetX))));
  blocks.addEventListener("mousemove", (event) => showTip(event, blockWords(state.atBlock(event.offsetX, event.offsetY))));
  for (const canvas of [strip, blocks]) canvas.addEventListener("mouseleave", (event) => showTip(event, ""));
  blocks.addEventListener("click", (event) => {
    const cell = state.atBlock(event.offsetX, event.offsetY);
    if (cell && cell.owner) select(cell.owner);
  });
  const repaint = () => {
    state.palette = paletteOf();
    for (const item of document.querySelectorAll(".line > [data-id]")) item.style.setProperty("--hue", colourOf(item.dataset.id, state.palette.isDark));
    draw();
  };
  document.addEventListener("theme", repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("resize", drawSoon);
}

function startExport() {
  const dialog = byId("export-dialog");
  byId("export").addEventListener("click", () => {
    const view = history.frames.at(-1);
    if (!view) return;
    openWhatIf(history, view);
    dialog.showModal();
  });
  byId("export-steps").addEventListener("click", () => download("yard-steps.jsonl", stepLines(history), "application/jsonl"));
  byId("export-requests").addEventListener("click", () => download("yard-requests.jsonl", requestLines(history), "application/jsonl"));
  byId("export-perfetto").addEventListener("click", () => download("yard-trace.json", chromeTrace(history)));
  startWhatIf();
  byId("close-export").addEventListener("click", () => dialog.close());
}

export function startYard() {
  startPictures();
  startExport();
  byId("pause").addEventListener("click", togglePause);
  byId("scrub").addEventListener("input", () => {
    const frame = history.frames[byId("scrub").value];
    state.paused = frame && frame !== history.frames.at(-1) ? frame.time_s : null;
    draw();
  });
  byId("tenant-filter").addEventListener("change", (event) => { state.tenant = event.target.value; draw(); });
  byId("priority-filter").addEventListener("change", (event) => { state.priority = event.target.value; draw(); });
  document.addEventListener("model-in-view", () => { history.clear(); Object.assign(state, { paused: null, selected: null }); draw(); });
  document.addEventListener("shown", (event) => { if (event.detail === "yard") draw(); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== " " || byId("yard").hidden || event.target.closest("input, textarea, select, button, .line > div, dialog")) return;
    event.preventDefault();
    togglePause();
  });
  document.addEventListener("show-request", (event) => {
    const life = [...history.lives.values()].find((each) => each.request === event.detail);
    byId("tab-yard").click();
    if (life) { state.selected = life.id; draw(); }
  });
}
