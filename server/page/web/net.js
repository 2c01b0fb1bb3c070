// Requests to this server: the key, errors as sentences, server-sent events.

const KEY = "tokenyard.key";

const kept = new Map();

// A text that the browser keeps in `where`, sessionStorage or localStorage; where it forbids that, the page keeps it itself.
export function recall(where, name) {
  try { return window[where].getItem(name) ?? kept.get(name) ?? ""; } catch { return kept.get(name) ?? ""; }
}

export function remember(where, name, text) {
  kept.set(name, text);
  try { if (text) window[where].setItem(name, text); else window[where].removeItem(name); } catch { /* the page has it */ }
}

export function savedKey() { return recall("sessionStorage", KEY); }

export function saveKey(text) { remember("sessionStorage", KEY, text); }

export class Refused extends Error {
  constructor(status, code, message, retryAfter) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

// Ask the server. Throws Refused; a missing or wrong key also shows the form for it.
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (savedKey()) all.authorization = `Bearer ${savedKey()}`;
  if (body !== undefined) all["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(`.${path}`, {  // next to the page, also where a proxy has put it under a prefix
      method, headers: all, signal, cache: "no-store", credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "unreachable", "The server cannot be reached.");
  }
  if (reply.ok) return reply;
  const error = (await reply.json().catch(() => ({}))).error || {};
  if (reply.status === 401) document.dispatchEvent(new CustomEvent("key-wanted", { detail: Boolean(savedKey()) }));
  throw new Refused(reply.status, error.code || "", error.message || `Status ${reply.status}.`, reply.headers.get("retry-after"));
}

// Yield the data of each server-sent event, as text; comments between them are for `onComment`.
export async function* eventsOf(reply, onComment = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
        else if (part.startsWith(":")) onComment(part.slice(1).trim());
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not allowed here";
    area.remove();
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}
