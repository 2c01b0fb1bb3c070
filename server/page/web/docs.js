// The API as /openapi.json describes it: routes, fields, replies, and a form that sends a request.

import { ask, copy, element, saveKey } from "./net.js";

const byId = (id) => document.getElementById(id);
const MOST_DEPTH = 4;
const MOST_SHOWN = 65536;
let schemas = {};

const nameOf = (schema) => (schema.$ref || "").split("/").pop();
const resolved = (schema) => (schema.$ref ? schemas[nameOf(schema)] || {} : schema);
const choicesOf = (schema) => (schema.anyOf || schema.oneOf || []).filter((each) => each.type !== "null");

function bounds(schema) {
  const words = [];
  const add = (text, value) => { if (value !== undefined) words.push(`${text} ${value}`); };
  add("from", schema.minimum); add("above", schema.exclusiveMinimum); add("to", schema.maximum);
  add("at least", schema.minItems ?? schema.minLength); add("at most", schema.maxItems ?? schema.maxLength ?? schema.maxProperties);
  const unit = schema.type === "array" ? " entries" : schema.type === "string" ? " characters" : "";
  return words.length ? ` (${words.join(", ")}${schema.minItems || schema.maxItems || schema.maxLength || schema.minLength ? unit : ""})` : "";
}

// A type in words: `integer (from 0, to 20)`, `"auto" or "none"`, `list of Tool`.
function words(schema) {
  const choices = choicesOf(schema);
  if (choices.length) return choices.map(words).join(" or ");
  if (schema.$ref) {
    const target = resolved(schema);
    return target.enum || target.type === "string" ? words(target) : nameOf(schema);
  }
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? words(schema.items) : "anything"}${bounds(schema)}`;
  return `${schema.type || "anything"}${bounds(schema)}`;
}

// Objects that a field may hold, or the entries of a list in it.
function objectsIn(schema) {
  if (schema.type === "array") return schema.items ? objectsIn(schema.items) : [];
  const choices = choicesOf(schema);
  if (choices.length) return choices.flatMap(objectsIn);
  const target = resolved(schema);
  if (target !== schema && (choicesOf(target).length || target.type === "array")) return objectsIn(target);
  return target.properties ? [{ name: nameOf(schema), schema: target }] : [];
}

// Rows of a table of fields; those of an object stand below the field that holds it.
function rows(schema, depth = 0, seen = []) {
  const found = [];
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const isNeeded = (schema.required || []).includes(name);
    const title = element("code", { textContent: name, className: isNeeded ? "needed" : "" });
    const first = element("td", {}, title);
    first.style.setProperty("--depth", depth);
    const text = field.description || "";
    found.push(element("tr", {}, first, element("td", {}, element("span", { className: "dim", textContent: words(field) }), text ? ` ${text}` : "")));
    for (const each of objectsIn(field)) {
      if (depth < MOST_DEPTH && !seen.includes(each.name)) found.push(...rows(each.schema, depth + 1, [...seen, each.name]));
    }
  }
  return found;
}

function fields(schema) {
  const found = objectsIn(schema).flatMap((each) => rows(each.schema, 0, [each.name]));
  return found.length ? element("table", { className: "fields" }, ...found) : element("p", { className: "dim", textContent: words(schema) });
}

// The smallest body that the schema allows, where no example is given.
function exampleOf(schema, depth = 0) {
  const target = resolved(schema);
  if (target.examples && target.examples.length) return target.examples[0];
  const choices = choicesOf(target);
  if (choices.length) return exampleOf(choices[0], depth);
  if (target.const !== undefined) return target.const;
  if (target.enum) return target.enum[0];
  if (target.type === "object" && depth < MOST_DEPTH) {
    const needed = (target.required || []).filter((name) => target.properties && target.properties[name]);
    return Object.fromEntries(needed.map((name) => [name, exampleOf(target.properties[name], depth + 1)]));
  }
  if (target.type === "array") return target.items && depth < MOST_DEPTH ? [exampleOf(target.items, depth + 1)] : [];
  return { string: "text", integer: target.minimum || 1, number: target.minimum || 1, boolean: false }[target.type] ?? {};
}

const jsonOf = (part) => ((part || {}).content || {})["application/json"];

function curl(method, path, body) {
  const lines = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${new URL(`.${path}`, location.href).href}`];
  if (body) lines.push("-H 'Content-Type: application/json'", `-d '${body.replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

function trying(method, path, schema) {
  const body = schema ? element("textarea", { value: JSON.stringify(exampleOf(schema), null, 2), spellcheck: false }) : null;
  const address = element("input", { value: path, type: "text" });
  if (body) body.setAttribute("aria-label", "Body");
  address.setAttribute("aria-label", "Path");
  const shown = element("pre", { hidden: true });
  const send = element("button", { textContent: "Send", className: "primary", type: "button" });
  const asCurl = element("button", { textContent: "Copy as curl", type: "button" });
  asCurl.addEventListener("click", () => copy(curl(method, address.value, body && body.value), asCurl));
  send.addEventListener("click", async () => {
    send.disabled = true;
    shown.hidden = false;
    shown.textContent = "";
    try {
      const reply = await ask(address.value, { method: method.toUpperCase(), body: body ? JSON.parse(body.value) : undefined });
      await readInto(shown, reply);
    } catch (error) {
      shown.textContent = error.status ? `${error.status} ${error.code}\n${error.message}` : error.message;
    }
    send.disabled = false;
  });
  const parts = [path.includes("{") ? address : "", body || "", element("div", { className: "row" }, send, asCurl), shown];
  return element("div", { className: "try" }, ...parts);
}

// Show a reply while it comes; the whole of it as indented JSON where it is that.
async function readInto(shown, reply) {
  const reader = reply.body ? reply.body.pipeThrough(new TextDecoderStream()).getReader() : null;
  let text = "";
  while (reader) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
    shown.textContent = text;
    if (text.length > MOST_SHOWN) { reader.cancel(); text = `${text.slice(0, MOST_SHOWN)}\n… the rest is not shown`; break; }
  }
  try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* a stream, or plain text */ }
  shown.textContent = text || `${reply.status}, without a body`;
}

function details(method, path, operation) {
  const body = jsonOf(operation.requestBody);
  const parts = [element("p", { textContent: operation.description || "" })];
  const parameters = operation.parameters || [];
  if (parameters.length) {
    const schema = { properties: Object.fromEntries(parameters.map((each) => [each.name, each.schema])), required: parameters.filter((each) => each.required).map((each) => each.name) };
    parts.push(element("h3", { textContent: "Parameters" }), element("table", { className: "fields" }, ...rows(schema)));
  }
  if (body) {
    const target = resolved(body.schema);
    parts.push(element("h3", { textContent: "Body" }), fields(body.schema));
    const refused = (target.description || "").split("\n\n").find((each) => each.startsWith("Refused by name"));
    if (refused) parts.push(element("p", { className: "refused", textContent: refused.replaceAll("`", "") }));
  }
  for (const [status, reply] of Object.entries(operation.responses || {})) {
    const json = jsonOf(reply);
    parts.push(element("h3", { textContent: `Reply ${status}` }), element("p", { className: "dim", textContent: reply.description || "" }));
    if (json && !/^[45]/.test(status)) parts.push(fields(json.schema));
  }
  const isForm = operation.requestBody && !body;
  if (!isForm) parts.push(element("h3", { textContent: "Try it" }), trying(method, path, body && body.schema));
  return element("div", {}, ...parts);
}

function card(method, path, operation) {
  const made = element("details", { className: "operation" },
    element("summary", {}, element("span", { className: `verb ${method}`, textContent: method.toUpperCase() }),
      element("code", { textContent: path }), element("span", { className: "dim", textContent: (operation.description || "").split("\n")[0] })));
  made.id = `${method}${path}`;
  // Most are never opened: their tables are made when they are.
  made.addEventListener("toggle", () => { if (made.open && made.childElementCount === 1) made.append(details(method, path, operation)); });
  made.dataset.words = `${method} ${path} ${operation.description || ""} ${Object.keys(fieldsOf(operation)).join(" ")}`.toLowerCase();
  return made;
}

const fieldsOf = (operation) => resolved((jsonOf(operation.requestBody) || {}).schema || {}).properties || {};

const GROUPS = [["OpenAI's API", /^\/v1\/(chat|completions|responses|models|embeddings|files|batches)/], ["Anthropic's API", /^\/v1\/messages/], ["Ollama's API", /^\/api\//],
  ["Scores, tokens and more", /^\/(v1\/|tokeni|detokeni|invocations)/], ["Operation", /./]];

function draw(document_) {
  schemas = (document_.components || {}).schemas || {};
  byId("version").textContent = document_.info.version;
  const left = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  const parts = [];
  for (const [title, pattern] of GROUPS) {
    const mine = left.filter((each) => pattern.test(each.path));
    mine.forEach((each) => left.splice(left.indexOf(each), 1));
    if (mine.length) parts.push(element("h2", { textContent: title }), ...mine.map((each) => card(each.method, each.path, each.operation)));
  }
  byId("operations").replaceChildren(...parts);
  choose();
  openAsked();
}

function choose() {
  const word = byId("filter").value.trim().toLowerCase();
  for (const each of document.querySelectorAll(".operation")) each.hidden = !each.dataset.words.includes(word);
}

function openAsked() {
  const asked = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (asked) { asked.open = true; asked.scrollIntoView(); }
}

async function load() {
  const note = byId("docs-note");
  try {
    draw(await (await ask("/openapi.json")).json());
    note.hidden = true;
  } catch (error) {
    note.hidden = false;
    note.textContent = error.status === 404 ? "The document of the API is not served at this address." : error.message;
  }
}

document.addEventListener("key-wanted", (event) => {
  byId("key-form").hidden = false;
  byId("key-note").textContent = event.detail ? "That key is not known here." : "";
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key-form").hidden = true;
  load();
});
byId("filter").addEventListener("input", choose);
addEventListener("hashchange", openAsked);
const saved = localStorage.getItem("tokenyard.theme");
if (saved) document.documentElement.dataset.theme = saved;
load();
