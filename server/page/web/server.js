// The server tab: facts, options with their origin, recent errors.

import { inView } from "./models.js";
import { ask, element } from "./net.js";

const byId = (id) => document.getElementById(id);
let last = null;

const size = (bytes) => (bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`);
const count = (number) => number.toLocaleString("en");

export function startServer() {
  byId("only-set").addEventListener("change", () => last && drawOptions(last.options));
  document.addEventListener("model-in-view", () => { if (!byId("server").hidden) showServer(); });
  document.addEventListener("key", () => { if (!byId("server").hidden) showServer(); });
}

export async function showServer() {
  const note = byId("server-note");
  try {
    last = await (await ask(`/admin/server${inView()}`)).json();
    note.hidden = true;
    draw(last);
  } catch (error) {
    note.hidden = false;
    note.textContent = error.status === 404 ? "The facts of the server are not shown at this address (see the yard)." : error.message;
  }
}

function draw(facts) {
  const rows = [["Tokenyard", facts.version], ["State", facts.detail === facts.state ? facts.state : `${facts.state}: ${facts.detail}`], ["Address", location.origin]];
  const model = facts.model;
  if (model) {
    rows.push(["Model", model.name], ["Kind", `${model.model_type}, ${count(model.num_parameters)} parameters, ${model.dtype}`], ["Device", model.device],
      ["Context", `${count(model.max_model_len)} tokens`]);
    if (model.kv_cache_bytes) rows.push(["KV cache", `${count(model.num_blocks * model.block_size)} tokens in ${count(model.num_blocks)} blocks of ${model.block_size}, ${size(model.kv_cache_bytes)}`]);
    const groups = Object.entries(model.bytes_by_group);
    if (groups.length > 1) rows.push(["A request of full length", groups.map(([name, bytes]) => `${size(bytes)} for ${name}`).join(", ")]);
    rows.push(["Chat template", model.has_chat_template ? "yes" : "none: use /v1/completions"]);
  }
  byId("facts").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const errors = facts.errors.slice().reverse();
  const cells = (tag, texts) => element("tr", {}, ...texts.map((text) => element(tag, { textContent: text })));
  byId("errors").replaceChildren(errors.length
    ? element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Recent errors" }, element("table", {}, cells("th", ["time", "status", "code", "field", "message", "route", "request"]),
      ...errors.map((error) => cells("td", [new Date(error.time_s * 1000).toLocaleTimeString(), String(error.status), error.code, error.param, error.message, `${error.method} ${error.route}`, error.request_id.slice(0, 14)]))))
    : element("p", { className: "dim", textContent: "None since the start. docs/errors.md explains each code." }));
  drawOptions(facts.options);
}

function drawOptions(options) {
  const onlySet = byId("only-set").checked;
  const shown = Object.entries(options).filter(([, row]) => !onlySet || row.origin !== "default");
  const head = element("tr", {}, ...["option", "value", "from"].map((text) => element("th", { textContent: text })));
  byId("options").replaceChildren(head, ...shown.map(([name, row]) => element("tr", { className: row.origin === "default" ? "" : "set" },
    element("td", {}, element("code", { textContent: `--${name}` })), element("td", { textContent: row.shown }), element("td", { textContent: row.origin }))));
}
