// The list of kept conversations: search, open, delete, files in and out.

import { download, element, recall, remember } from "./net.js";
import { MOST, drop, fileOf, heads, keep, readFile, turnsOf, whyNot } from "./saved.js";

const byId = (id) => document.getElementById(id);
const OPEN = "tokenyard.conversation", LIST = "tokenyard.list";
export const isNarrow = () => innerWidth <= 760;  // as page.css has it: room for one of the two panels

let chat = null;

function note(text) { byId("storage-note").textContent = text; byId("storage-note").hidden = !text; }

// Keep it and show it in the list. A refusal of the browser is shown, and the chat goes on without.
export async function keepAndShow(talk) {
  if (talk.isGone) return;
  try {
    await keep(talk);
    note("");
    await draw();
  } catch (error) { note(whyNot(error)); }
}

export function isOpenNow(talk) { remember("sessionStorage", OPEN, talk.id); mark(); }

function mark() {
  for (const item of byId("kept").children) item.firstElementChild.setAttribute("aria-current", String(item.dataset.id === chat.current().id));
}

// Redrawn with the focus where it was.
async function draw() {
  const words = byId("find").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const all = await heads();
  const found = all.filter((head) => words.every((word) => head.words.includes(word) || head.model.toLowerCase().includes(word)));
  const focused = byId("kept").contains(document.activeElement) ? document.activeElement : null;
  const [id, place] = focused ? [focused.parentElement.dataset.id, [...focused.parentElement.children].indexOf(focused)] : [];
  byId("kept").replaceChildren(...found.map(item));
  byId("kept-count").textContent = words.length ? `${found.length} of ${all.length}` : all.length ? "" : "None yet.";
  mark();
  if (focused) ([...byId("kept").children].find((each) => each.dataset.id === id)?.children[place] ?? byId("find")).focus();
  return all;
}

function item(head) {
  const when = new Date(head.changedMs);
  const day = when.toDateString() === new Date().toDateString() ? when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : when.toLocaleDateString();
  const open = element("button", { type: "button", className: "open" }, element("span", { textContent: head.title }), element("small", { textContent: `${head.model} · ${day}` }));
  open.addEventListener("click", () => openOne(head));
  const remove = sure(element("button", { type: "button", className: "quiet", textContent: "✕", title: "Delete", ariaLabel: `Delete ${head.title}` }), () => removeAll([head.id]));
  const made = element("li", {}, open, remove);
  made.dataset.id = head.id;
  return made;
}

// A button that acts when it is pressed again; meanwhile it asks.
function sure(button, act) {
  const { textContent: text, ariaLabel: label } = button;
  const calm = () => { button.textContent = text; button.ariaLabel = label; delete button.dataset.asks; };
  button.addEventListener("click", () => {
    if (button.dataset.asks) { calm(); act(); return; }
    button.dataset.asks = "yes";
    button.textContent = "Delete?";
    button.ariaLabel = label ? `Really ${label[0].toLowerCase()}${label.slice(1)}?` : null;
  });
  button.addEventListener("blur", calm);
  return button;
}

async function removeAll(ids) {
  if (ids.includes(chat.current().id)) {
    chat.current().isGone = true;
    chat.begin();
  }
  try { await drop(ids); await draw(); } catch (error) { note(whyNot(error)); }
  byId("find").focus();
}

async function openOne(head) {
  try {
    const turns = await turnsOf(head.id);
    if (!turns) { await draw(); return; }
    chat.open({ id: head.id, model: head.model, system: head.system, turns: turns.map((turn) => ({ ...turn, isDone: true })) });
    if (isNarrow()) show(false);
  } catch (error) { note(whyNot(error)); }
}

function show(isShown) {
  byId("conversations").hidden = !isShown;
  byId("list-button").setAttribute("aria-expanded", String(isShown));
}

async function importFile(file) {
  try {
    const talks = await readFile(file);
    const room = MOST - (await heads()).length;
    if (talks.length > room) throw new Error(`it has ${talks.length} conversations, and there is room for ${room}: delete some first`);
    for (const talk of talks) await keep(talk);
    const all = await draw();
    const last = all.find((head) => head.id === talks.at(-1).id);
    if (last) await openOne(last);
    note("");
  } catch (error) { note(error instanceof DOMException || error.name === "TooLong" ? whyNot(error) : `${file.name} was not read: ${error.message}.`); }
}

async function saveAll() {
  try {
    const all = [];
    for (const head of await heads()) all.push(fileOf({ ...head, turns: (await turnsOf(head.id)) ?? [] }));
    download("conversations.json", JSON.stringify({ conversations: all }, null, 1));
  } catch (error) { note(whyNot(error)); }
}

// `calls`: current() is the conversation in view, open(one) shows another, begin() shows an empty one.
export async function startConversations(calls) {
  chat = calls;
  const wasShown = recall("localStorage", LIST);
  show(!isNarrow() && wasShown !== "no");
  byId("list-button").addEventListener("click", () => {
    const isShown = byId("conversations").hidden;
    show(isShown);
    if (!isNarrow()) remember("localStorage", LIST, isShown ? "yes" : "no");
    else if (isShown && !byId("settings").hidden) byId("settings-button").click();
    if (isShown) byId("find").focus();
  });
  const redraw = () => draw().catch((error) => note(whyNot(error)));
  byId("find").addEventListener("input", redraw);
  addEventListener("focus", redraw);  // another tab may have kept more
  byId("import-chat").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async () => {
    const [file] = byId("import-file").files;
    if (file) await importFile(file);
    byId("import-file").value = "";
  });
  byId("export-chat").addEventListener("click", () => download("conversation.json", JSON.stringify(fileOf(chat.current()), null, 2)));
  byId("export-all").addEventListener("click", saveAll);
  sure(byId("delete-all"), async () => { try { await removeAll((await heads()).map((head) => head.id)); } catch (error) { note(whyNot(error)); } });
  try {
    const wanted = recall("sessionStorage", OPEN);
    const head = (await draw()).find((each) => each.id === wanted);
    if (head && !chat.current().turns.length) await openOne(head);
  } catch (error) { note(whyNot(error)); }
}
