// The chat: a conversation, its settings, and replies that are shown while they come.

import { Attached, contentOf, folded, thumbnails } from "./attached.js";
import { isNarrow, isOpenNow, keepAndShow, startConversations } from "./conversations.js";
import { codeBlock, render } from "./markdown.js";
import { Refused, ask, copy, element, eventsOf, savedKey } from "./net.js";
import { newId } from "./saved.js";
import { snippet } from "./snippets.js";

const byId = (id) => document.getElementById(id);
const LIMITS = [0, 1, 2, 3, 5, 8, 10, 15, 20, 30, 60, 120, 300];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const EXAMPLES = ["Hello! Who are you?", "Tell me a short story about a train.", "Write a list of three animals."];

const KEEP_EVERY_MS = 2000;

const blank = () => ({ id: newId(), model: "", system: "", turns: [] });
const state = { model: "", models: new Map(), needsKey: false, talk: blank(), running: null };
// A turn: {role: "user", content, pictures, files} | {role: "assistant", content, reasoning, calls, stats, asked, system, error} | {role: "tool", content, callId}

// The request.

function parsed(id, name, check) {
  const text = byId(id).value.trim();
  if (!text) return undefined;
  let value;
  try { value = JSON.parse(text); } catch (error) { throw new Refused(0, "", `${name}: not valid JSON (${error.message}).`); }
  if (!check(value)) throw new Refused(0, "", `${name}: this is JSON of another kind.`);
  return value;
}

function messagesOf(system, turns) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") messages.push({ role: "user", content: contentOf(turn) });
    else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.content });
    else {
      const message = { role: "assistant", content: turn.content || (turn.calls.length ? null : "") };
      if (turn.calls.length) message.tool_calls = turn.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
      messages.push(message);
    }
  }
  return messages;
}

// The request but for its messages.
function terms() {
  const body = { model: state.model, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
  const schema = parsed("schema", "The schema", (value) => value && typeof value === "object" && !Array.isArray(value));
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
  const tools = parsed("tools", "Tools", Array.isArray);
  if (tools) body.tools = tools;
  if (!byId("priority").disabled && Number(byId("priority").value)) body.priority = Number(byId("priority").value);
  if (LIMITS[byId("limit").value]) body.timeout = LIMITS[byId("limit").value];
  return body;
}

// The reply.

function takeChunk(turn, chunk) {
  if (chunk.error) throw new Refused(0, chunk.error.code, chunk.error.message);
  if (chunk.usage) turn.stats.usage = chunk.usage;
  const choice = chunk.choices && chunk.choices[0];
  if (!choice) return;
  const delta = choice.delta || {};
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || reasoning || delta.tool_calls) {
    turn.stats.lastMs = performance.now();
    turn.stats.firstMs ??= turn.stats.lastMs;
  }
  if (delta.content) turn.content += delta.content;
  if (reasoning) turn.reasoning += reasoning;
  for (const piece of delta.tool_calls || []) {
    const call = turn.calls[piece.index] ??= { id: "", name: "", args: "" };
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    call.args += piece.function?.arguments || "";
  }
  if (choice.finish_reason) turn.stats.finish = choice.finish_reason;
}

// Ask for the next turn, or for the rest of `begun`, the last one, that was cut.
async function answer(begun) {
  const turn = begun ?? { role: "assistant", content: "", reasoning: "", calls: [] };
  const { talk } = state;
  let asked;
  Object.assign(turn, { isDone: false, error: "", stats: begun ? { isContinued: true } : {}, system: byId("system").value.trim() });
  try {
    asked = terms();
    turn.asked ??= asked;  // the copied request is that of the whole reply
  } catch (error) {
    turn.error = error.message;
  }
  const messages = messagesOf(turn.system, talk.turns);
  if (begun) Object.assign(asked = { ...asked }, { continue_final_message: true, add_generation_prompt: false, response_format: undefined });
  else talk.turns.push(turn);
  Object.assign(talk, { model: state.model, system: turn.system });
  if (turn.error) { turn.isDone = true; drawAll(); return; }
  const mine = state.running = new AbortController();
  turn.stats.startMs = performance.now();
  drawAll();
  setBusy(true);
  state.load = "";  // how far the model is, while the reply waits for it
  keepAndShow(talk);
  isOpenNow(talk);
  let keptMs = turn.stats.startMs;
  try {
    const reply = await ask("/v1/chat/completions", { method: "POST", body: { ...asked, messages }, signal: mine.signal });
    turn.requestId = reply.headers.get("x-request-id") || "";
    const onComment = (text) => { state.load = text === "keep-alive" ? "" : `The model is not loaded yet: ${text} …`; drawSoon(turn); };
    for await (const data of eventsOf(reply, onComment)) {
      if (data === "[DONE]") break;
      state.load = "";
      takeChunk(turn, JSON.parse(data));
      drawSoon(turn);
      if (performance.now() - keptMs > KEEP_EVERY_MS) { keptMs = performance.now(); keepAndShow(talk); }
    }
  } catch (error) {
    if (error.name === "AbortError") turn.stats.finish = "stopped";
    else turn.error = error.message + (error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "");
  }
  turn.isDone = true;
  keepAndShow(talk);
  if (state.models.get(talk.model)?.status) findModel();  // what the model sees is known when it is loaded
  if (state.running !== mine) return;  // another conversation is in view
  state.running = null;
  setBusy(false);
  drawAll();
}

// Show another conversation; a reply that is under way in this one is stopped.
function show(talk) {
  state.running?.abort();
  state.running = null;
  state.talk = talk;
  setBusy(false);
  isOpenNow(talk);
  drawAll();
}

function setBusy(isBusy) {
  byId("stop").hidden = !isBusy;
  byId("send").hidden = isBusy;
}

function send(text, { pictures, files } = { pictures: [], files: [] }) {
  if (state.running || (!text.trim() && !pictures.length && !files.length)) return;
  state.talk.turns.push({ role: "user", content: text, pictures, files });
  answer();
}

function retryFrom(place) {
  if (state.running) return;
  state.talk.turns.length = place;
  answer();
}

// Drawing. The last reply is drawn again with each frame, all else once.

let isScheduled = false;

function drawSoon(turn) {
  if (isScheduled) return;
  isScheduled = true;
  const wait = turn.content.length > 20000 ? 400 : 30;
  setTimeout(() => requestAnimationFrame(() => {
    isScheduled = false;
    const box = byId("messages");
    if (!turn.isDone && box.lastElementChild) fill(box.lastElementChild, turn, state.talk.turns.length - 1);
    stickToEnd(box);
  }), wait);
}

function stickToEnd(box) {
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

function drawAll() {
  const box = byId("messages");
  if (!state.talk.turns.length) { box.replaceChildren(welcome()); return; }
  box.replaceChildren(...state.talk.turns.map((turn, place) => {
    const made = element("article", { className: `message ${turn.role}` });
    fill(made, turn, place);
    return made;
  }));
  box.scrollTop = box.scrollHeight;
}

function welcome() {
  const buttons = EXAMPLES.map((text) => {
    const button = element("button", { type: "button", textContent: text });
    button.addEventListener("click", () => send(text));
    return button;
  });
  const name = state.model ? `Talk to ${state.model}` : state.needsKey ? "A key opens the chat" : "No model is ready yet";
  return element("div", { className: "welcome" },
    element("img", { src: "page/icon.svg", alt: "", width: 48, height: 48 }),
    element("h2", { textContent: name }),
    element("p", { className: "dim", textContent: "Served by this machine. Open the Yard to watch each step of the scheduler." }),
    element("div", { className: "row" }, ...(state.model ? buttons : [])));
}

function action(text, act, title = "") {
  const button = element("button", { type: "button", textContent: text, title });
  button.addEventListener("click", () => act(button));
  return button;
}

function fill(box, turn, place) {
  if (turn.role === "user") fillUser(box, turn, place);
  else if (turn.role === "tool") box.replaceChildren(element("div", { className: "call" }, element("b", { textContent: "result" }), codeBlock(turn.content, "")));
  else fillAssistant(box, turn, place);
}

function fillUser(box, turn, place) {
  const body = turn.content.trim() ? [element("div", { className: "body", textContent: turn.content })] : [];
  box.replaceChildren(...thumbnails(turn.pictures ?? []), ...folded(turn.files ?? []), ...body, element("div", { className: "tools" }, action("Copy", (button) => copy(turn.content, button)), action("Edit", () => edit(box, turn, place))));
}

function edit(box, turn, place) {
  if (state.running) return;
  const area = element("textarea", { rows: 3, value: turn.content });
  area.setAttribute("aria-label", "Edit the message");
  box.replaceChildren(area, element("div", { className: "tools" },
    action("Send again", () => { state.talk.turns[place] = { ...turn, content: area.value }; retryFrom(place + 1); }),
    action("Leave as it was", () => drawAll())));
  area.focus();
}

function fillAssistant(box, turn, place) {
  const parts = [];
  if (turn.reasoning) {
    const wasOpen = box.querySelector("details")?.open ?? false;
    parts.push(element("details", { className: "reasoning", open: wasOpen }, element("summary", { textContent: turn.content ? "Reasoning" : "Reasoning …" }), turn.reasoning));
  }
  const body = element("div", { className: "body" });
  render(body, turn.content);
  if (!turn.isDone && !turn.error) (body.lastElementChild ?? body).classList.add("caret");
  if (!turn.isDone && state.load) parts.push(element("p", { className: "dim", role: "status", textContent: state.load }));
  parts.push(body);
  for (const call of turn.calls) if (call) parts.push(callCard(call, turn));
  if (turn.error) parts.push(element("div", { className: "failure", role: "alert", textContent: turn.error }));
  if (turn.isDone || turn.error) parts.push(meta(turn, place));
  box.replaceChildren(...parts);
}

function callCard(call, turn) {
  let args = call.args;
  try { args = JSON.stringify(JSON.parse(call.args), null, 2); } catch { /* not whole yet, or broken */ }
  const card = element("div", { className: "call" }, element("span", { className: "dim", textContent: "calls " }), element("b", { textContent: call.name }), codeBlock(args, turn.isDone ? "json" : ""));
  const isAnswered = state.talk.turns.some((each) => each.role === "tool" && each.callId === call.id);
  if (turn.isDone && !isAnswered && !turn.error) {
    const input = element("input", { placeholder: "The tool's result" });
    input.setAttribute("aria-label", `Result of ${call.name}`);
    const form = element("form", {}, input, element("button", { textContent: "Give it" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      state.talk.turns.push({ role: "tool", callId: call.id, content: input.value });
      const open = turn.calls.filter((each) => !state.talk.turns.some((other) => other.role === "tool" && other.callId === each.id));
      if (open.length) drawAll(); else answer();
    });
    card.append(form);
  }
  return card;
}

function meta(turn, place) {
  const { startMs, firstMs, lastMs, usage, finish } = turn.stats;
  const facts = [];
  if (firstMs) facts.push(`first token ${seconds(firstMs - startMs)}`);
  if (usage && lastMs - firstMs > 50) facts.push(`${((usage.completion_tokens - 1) / (lastMs - firstMs) * 1000).toFixed(1)} tokens/s`);
  if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (finish && finish !== "stop") facts.push({ length: "cut at the token limit", timeout: "cut by the time limit", tool_calls: "calls a tool" }[finish] || finish);
  if (turn.stats.isContinued) facts.push("continued");
  if (turn.asked?.priority) facts.push(`priority ${turn.asked.priority}`);
  const row = element("div", { className: "meta" }, ...facts.map((fact) => element("span", { textContent: fact })));
  if (turn.requestId) row.append(action("Yard", () => document.dispatchEvent(new CustomEvent("show-request", { detail: turn.requestId })), "The life of this request in the yard"));
  if (isCut(turn, place)) row.append(action("Continue", () => !state.running && answer(turn), "Ask for the rest of this reply"));
  row.append(action("Retry", () => retryFrom(place)), action("Copy", (button) => copy(turn.content, button)));
  if (turn.asked) {
    const body = { model: turn.asked.model, messages: messagesOf(turn.system, state.talk.turns.slice(0, place)), ...turn.asked };
    row.append(element("span", { textContent: "request as" }));
    for (const [name, language] of [["curl", "curl"], ["Python", "python"], ["JS", "js"]]) {
      row.append(action(name, (button) => copy(snippet(language, body, { needsKey: Boolean(savedKey()) }), button)));
    }
  }
  return row;
}

// Whether the rest of a reply can be asked for. A schema begins anew with each request, so not under one.
function isCut({ content, calls, error, asked, stats }, place) {
  const why = error || ["length", "stopped", "timeout"].includes(stats.finish);
  return Boolean(why && content) && !calls.length && !asked?.response_format && place === state.talk.turns.length - 1;
}

function seconds(ms) { return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`; }

// Under fcfs no request is more urgent than another, and the slider sleeps.
function showPriority(isAsleep = byId("priority").disabled) {
  const { value } = byId("priority");
  byId("priority").disabled = isAsleep;
  byId("priority-value").textContent = isAsleep ? "off: fcfs" : value > 0 ? `+${value}` : value;
}

// The start.

function offerModels(models) {
  state.models = new Map(models.map((each) => [each.id, each]));
  byId("model").replaceChildren(...models.map(({ id, status }) => element("option", { value: id, textContent: status?.value === "unloaded" ? `${id} (loaded when asked)` : id })));
  byId("model-choice").hidden = models.length < 2;
  chooseModel(state.talk.model);
}

// The model of a conversation, where it is still served; else the one that was chosen last, or the first.
function chooseModel(name) {
  state.model = [name, state.model, ...state.models.keys()].find((each) => state.models.has(each)) ?? "";
  byId("model").value = state.model;
  byId("prompt").title = `${seesPictures() ? "Pictures and text" : "Text"} files may be dropped or pasted here.`;
}

const seesPictures = () => Boolean(state.models.get(state.model)?.capabilities?.vision);

async function findModel() {
  try {
    const listed = await (await ask("/v1/models")).json();
    offerModels((listed.data || []).filter((each) => each.id === each.root));
  } catch (error) {
    if (error.status === 401) { state.needsKey = true; drawAll(); return; }
    if (error.status === 404) {
      byId("messages").replaceChildren(element("p", { className: "notice", textContent: "There is no chat at this port: it is for administration only. The yard is here." }));
      return;
    }
    setTimeout(findModel, 2000);
  }
  if (!state.talk.turns.length) drawAll();
}

export function startChat() {
  drawAll();
  findModel();
  document.addEventListener("key", findModel);
  byId("model").addEventListener("change", () => {
    state.talk.model = byId("model").value;
    chooseModel(state.talk.model);
    if (!state.talk.turns.length) drawAll();
  });
  const prompt = byId("prompt");
  const grow = () => { prompt.style.height = "auto"; prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 260)}px`; };
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); byId("composer").requestSubmit(); }
  });
  const attached = new Attached({ box: byId("attached"), note: byId("attach-note"), target: byId("composer"), seesPictures });
  byId("attach").addEventListener("click", () => byId("attach-files").click());
  byId("attach-files").addEventListener("change", () => { attached.add([...byId("attach-files").files]); byId("attach-files").value = ""; });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.running) return;
    const text = prompt.value;
    prompt.value = "";
    grow();
    send(text, attached.take());
  });
  byId("stop").addEventListener("click", () => state.running?.abort());
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") state.running?.abort(); });
  byId("priority").addEventListener("input", () => showPriority());
  document.addEventListener("policy", (event) => showPriority(event.detail === "fcfs"));
  byId("limit").addEventListener("input", () => {
    const limit = LIMITS[byId("limit").value];
    byId("limit-value").textContent = limit ? `${limit} s` : "none";
  });
  byId("settings-button").addEventListener("click", () => {
    byId("settings").hidden = !byId("settings").hidden;
    byId("settings-button").setAttribute("aria-expanded", String(!byId("settings").hidden));
    if (isNarrow() && !byId("settings").hidden && !byId("conversations").hidden) byId("list-button").click();
  });
  const begin = () => { show(blank()); prompt.focus(); };
  byId("begin").addEventListener("click", begin);
  const open = (talk) => {
    show(talk);
    byId("system").value = talk.system;
    chooseModel(talk.model);
    if (talk.model && state.models.size && talk.model !== state.model) byId("messages").append(element("p", { className: "dim", textContent: `${talk.model} is not served here now: ${state.model} answers.` }));
  };
  startConversations({ current: () => state.talk, open, begin });
}
