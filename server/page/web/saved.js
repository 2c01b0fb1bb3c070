// Conversations that this browser keeps: heads for the list and its search, turns apart from them, and files of both.

import { MOST_BYTES as MOST_BYTES_OF_TEXT, MOST_FILES, PICTURE } from "./attached.js";

export const MOST = 200;
const MIB = 2 ** 20;
const MOST_BYTES = 100 * MIB, MOST_BYTES_OF_ONE = 16 * MIB, MOST_BYTES_OF_FILE = 32 * MIB;
const MOST_TURNS = 5000, MOST_SEARCHED = 100_000;

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("tokenyard", 1);
    asked.addEventListener("upgradeneeded", () => ["heads", "turns"].forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" })));
    asked.addEventListener("success", () => resolve(asked.result));
    asked.addEventListener("error", () => reject(asked.error));
  }).catch((error) => { opened = null; throw error; });
  return opened;
}

// Both stores change together or not at all. Resolves to what the request that `act` returns has found.
async function within(mode, act) {
  const transaction = (await database()).transaction(["heads", "turns"], mode);
  return new Promise((resolve, reject) => {
    let made;
    transaction.addEventListener("complete", () => resolve(made?.result));
    transaction.addEventListener("abort", () => reject(transaction.error ?? new Error("it was given up")));
    try { made = act(transaction.objectStore("heads"), transaction.objectStore("turns")); } catch (error) { reject(error); transaction.abort(); }
  });
}

// Why the browser keeps nothing, as a sentence.
export function whyNot(error) {
  if (error.name === "QuotaExceededError") return "The browser's storage is full: this conversation is kept no further. Delete some, or save it as JSON.";
  if (error.name === "TooLong") return error.message;
  return `This browser lets the page keep nothing (${error.name}): conversations end with the tab.`;
}

// Heads, the newest first: {id, title, model, system, changedMs, words, size}.
export async function heads() {
  return (await within("readonly", (kept) => kept.getAll())).sort((one, other) => other.changedMs - one.changedMs);
}

export async function turnsOf(id) { return (await within("readonly", (_, turns) => turns.get(id)))?.turns ?? null; }

export function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user");
  return first?.content.trim().split("\n")[0].slice(0, 80) || first?.files?.[0]?.name || (first?.pictures?.length ? "Pictures" : "New conversation");
}

// Keep a conversation as it is now; the oldest leave when there are more than MOST or 100 MiB. Throws what whyNot tells.
export async function keep({ id, model, system, turns }) {
  const kept = turns.map(({ isDone, ...turn }) => (turn.role === "assistant" && !isDone ? { ...turn, stats: { ...turn.stats, finish: "stopped" } } : turn));
  const words = kept.flatMap((turn) => [turn.content, ...(turn.files ?? []).map((file) => file.name)]).join("\n").slice(0, MOST_SEARCHED).toLowerCase();
  const size = JSON.stringify(kept).length;
  if (size > MOST_BYTES_OF_ONE) throw Object.assign(new Error("This conversation is longer than 16 MiB: what is new in it is not kept. Save it as JSON, or begin a new one."), { name: "TooLong" });
  await within("readwrite", (all, allTurns) => {
    all.put({ id, title: titleOf(turns), model, system, changedMs: Date.now(), words, size });
    return allTurns.put({ id, turns: kept });
  });
  const surplus = [];
  let bytes = 0;
  for (const [place, head] of (await heads()).entries()) {
    bytes += head.size;
    if (place >= MOST || (bytes > MOST_BYTES && head.id !== id)) surplus.push(head.id);
  }
  if (surplus.length) await drop(surplus);
}

export async function drop(ids) {
  await within("readwrite", (all, turns) => { for (const id of ids) { all.delete(id); turns.delete(id); } });
}

// Files.

const isText = (value) => typeof value === "string";

function fail(place, why) { throw new Error(`turn ${place + 1}: ${why}`); }

function checkedTurn(turn, place) {
  if (!turn || typeof turn !== "object") fail(place, "not an object");
  const content = turn.content ?? "";
  if (!isText(content)) fail(place, "its content is no text");
  if (turn.role === "user") {
    const pictures = turn.pictures ?? [];
    if (!Array.isArray(pictures) || !pictures.every((url) => isText(url) && PICTURE.test(url))) fail(place, "a picture that is no PNG, JPEG, WebP or GIF as a data URL");
    const files = turn.files ?? [];
    const isFile = (file) => file && isText(file.name) && isText(file.text) && file.text.length <= MOST_BYTES_OF_TEXT;
    if (!Array.isArray(files) || files.length > MOST_FILES || !files.every(isFile)) fail(place, `its files are not ${MOST_FILES} texts at most`);
    return { role: "user", content, pictures, files: files.map(({ name, text }) => ({ name: name.slice(0, 200), text })) };
  }
  if (turn.role === "tool") {
    if (!isText(turn.callId)) fail(place, "a result that names no call");
    return { role: "tool", content, callId: turn.callId };
  }
  if (turn.role !== "assistant") fail(place, "its role is none of user, assistant and tool");
  const calls = turn.calls ?? [];
  if (!Array.isArray(calls) || !calls.every((call) => call && [call.id, call.name, call.args].every(isText))) fail(place, "a call without id, name and args");
  const finish = isText(turn.finish) ? { finish: turn.finish.slice(0, 40) } : {};
  return { role: "assistant", content, reasoning: isText(turn.reasoning) ? turn.reasoning : "", error: "", stats: finish, isDone: true,
    calls: calls.map(({ id, name, args }) => ({ id, name, args })) };
}

function checked(one) {
  if (!one || !Array.isArray(one.turns) || !one.turns.length) throw new Error("it has no turns");
  if (one.turns.length > MOST_TURNS) throw new Error(`it has more than ${MOST_TURNS} turns`);
  return { id: newId(), model: isText(one.model) ? one.model.slice(0, 200) : "", system: isText(one.system) ? one.system : "", turns: one.turns.map(checkedTurn) };
}

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

// The conversations of a file that this page has saved: one of them, or all. Throws an Error that says what is wrong.
export async function readFile(file) {
  if (file.size > MOST_BYTES_OF_FILE) throw new Error("it is longer than 32 MiB");
  let value;
  try { value = JSON.parse(await file.text()); } catch { throw new Error("it is not JSON"); }
  const all = Array.isArray(value?.conversations) ? value.conversations : [value];
  if (!all.length || all.length > MOST) throw new Error(`it has ${all.length} conversations; 1 to ${MOST} are read`);
  return all.map(checked);
}

export function fileOf({ model, system, turns }) {
  return { model, system, turns: turns.map(({ role, content, reasoning, calls, callId, pictures, files, stats }) => ({ role, content, reasoning, calls, callId, pictures, files, finish: stats?.finish })) };
}
