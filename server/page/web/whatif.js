// What-if runs: the requests of the last minute, simulated by the server under other settings.

import { requestLines, someSettings, stepLines, whatIf } from "./files.js";
import { ask, copy, element } from "./net.js";

const byId = (id) => document.getElementById(id);
const MOST_LINES = 16;  // of a picture that has one for each setting and kind of request
let seen = null;  // what the dialog was opened with

export function openWhatIf(history, view) {
  // The times of steps are fitted to their counts: what each sequence had in them is not sent, nor more than the last 5000.
  const steps = history.steps.slice(-5000).map((step) => ({ ...step, decodes: [], chunks: [], requests: [] }));
  seen = { view, steps: stepLines({ steps }), requests: requestLines(history) };
  byId("what-if-settings").value ||= someSettings(view);
  showCommands();
}

const showCommands = () => { byId("what-if").textContent = whatIf(seen.view, byId("what-if-settings").value); };

export function startWhatIf() {
  byId("what-if-form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  byId("what-if-settings").addEventListener("input", showCommands);
  byId("copy-what-if").addEventListener("click", (event) => copy(byId("what-if").textContent, event.target));
}

async function run() {
  const { view, steps, requests } = seen;
  byId("run-what-if").disabled = true;
  byId("what-if-note").textContent = "Simulating …";
  try {
    const reply = await ask("/admin/what_if", { method: "POST", body: {
      steps, requests, num_blocks: view.stats.num_blocks, block_size: view.block_size, max_num_seqs: view.max_num_seqs, scheduling_policy: view.policy,
      compare: byId("what-if-settings").value.replaceAll(" ", "") } });
    const { runs, pictures } = await reply.json();
    byId("what-if-note").textContent = "";
    byId("what-if-runs").replaceChildren(...rows(runs));
    byId("what-if-ttft").hidden = runs.length * runs[0].classes.length > MOST_LINES;
    for (const [name, svg] of Object.entries(pictures)) byId(`what-if-${name}`).src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
    byId("what-if-found").hidden = false;
  } catch (error) {
    byId("what-if-note").textContent = error.message;
    byId("what-if-found").hidden = true;
  }
  byId("run-what-if").disabled = false;
}

const fixed = (value, digits = 1) => (value === undefined || value === null ? "" : value.toFixed(digits));
const percent = (value) => `${fixed(value * 100)} %`;
const sum = (counts) => Object.values(counts).reduce((all, each) => all + each, 0);

function rows(runs) {
  const lines = [["requests/s", (run) => fixed(run.requests_per_s, 2)], ["output tokens/s", (run) => fixed(run.output_tokens_per_s)], ["busy", (run) => percent(run.busy_share)],
    ["KV use, mean", (run) => percent(run.mean_kv_use)], ["waiting, most", (run) => run.max_waiting], ["preemptions", (run) => sum(run.preemptions)]];
  const named = (each) => `${each.priority === undefined ? "" : `priority ${each.priority}`}${each.tenant ? ` ${each.tenant}` : ""}`;
  runs[0].classes.forEach((each, place) => {
    for (const [kind, text] of [["ttft_ms", "TTFT"], ["itl_ms", "ITL"]]) {
      for (const share of ["p50", "p99"]) lines.push([`${named(each)}: ${text} ${share}, ms`, (run) => fixed(run.classes[place]?.[kind]?.[share])]);
    }
  });
  const head = element("tr", {}, element("td"), ...runs.map((run) => element("th", { scope: "col", textContent: run.name })));
  return [head, ...lines.map(([text, of]) => element("tr", {}, element("th", { scope: "row", textContent: text }), ...runs.map((run) => element("td", { textContent: of(run) }))))];
}
