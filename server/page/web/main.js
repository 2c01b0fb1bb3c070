// Tabs, theme, key, and the one stream of views that all tabs share.

import { startChat } from "./chat.js";
import { inView, startModels } from "./models.js";
import { ask, eventsOf, recall, remember, saveKey, savedKey } from "./net.js";
import { showServer, startServer } from "./server.js";
import { startYard, takeView, yardIsClosed } from "./yard.js";

const byId = (id) => document.getElementById(id);
const TABS = ["chat", "yard", "server"];

function show(name) {
  for (const each of TABS) {
    const isShown = each === name;
    byId(each).hidden = !isShown;
    byId(`tab-${each}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${each}`).tabIndex = isShown ? 0 : -1;
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  document.dispatchEvent(new CustomEvent("shown", { detail: name }));
  if (name === "server") showServer();
}

function startTabs() {
  TABS.forEach((name, place) => {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => show(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = TABS[(place + step + TABS.length) % TABS.length];
      show(next);
      byId(`tab-${next}`).focus();
    });
  });
  const asked = () => { const name = location.hash.slice(1); return TABS.includes(name) ? name : "chat"; };
  addEventListener("hashchange", () => show(asked()));
  show(asked());
}

function startTheme() {
  const saved = recall("localStorage", "tokenyard.theme");
  if (saved) document.documentElement.dataset.theme = saved;
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    remember("localStorage", "tokenyard.theme", next);
    document.dispatchEvent(new Event("theme"));
  });
}

function startKey() {
  document.addEventListener("key-wanted", (event) => {
    byId("key-form").hidden = false;
    byId("key-note").textContent = event.detail ? "That key is not known here." : "";
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    saveKey(byId("key").value.trim());
    byId("key").value = "";
    byId("key-form").hidden = true;
    document.dispatchEvent(new Event("key"));
    watch();
  });
}

let watching = null, policy = null;

async function watch() {
  if (watching) watching.abort();
  const mine = watching = new AbortController();
  pulse("", "");
  let pauseMs = 500;
  while (!mine.signal.aborted) {
    let reason = "The stream of views has ended; trying again.";
    try {
      const reply = await ask(`/admin/events${inView()}`, { signal: mine.signal });
      pauseMs = 500;
      for await (const data of eventsOf(reply)) {
        const view = JSON.parse(data);
        if (view.policy !== policy) document.dispatchEvent(new CustomEvent("policy", { detail: policy = view.policy }));
        takeView(view, pulse);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) { pulse("", "a key is needed"); yardIsClosed("The yard needs a key that may administer."); return; }
      if (error.status === 403) { yardIsClosed("This key may not see the yard: it needs one that may administer."); pulse("", ""); return; }
      if (error.status === 404) { yardIsClosed("The yard is not shown at this address. It is served at a loopback address, to keys that may administer, with --enable-admin, or at --admin-port."); pulse("", ""); return; }
      reason = error.message;
    }
    yardIsClosed(reason);
    pulse("bad", "not connected");
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(pauseMs * 2, 8000);
  }
}

function pulse(kind, text) {
  byId("pulse").className = `pulse ${kind}`;
  byId("pulse").textContent = text;
}

function startWatching() {
  // A hidden page costs the engine nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { if (watching) watching.abort(); watching = null; } else if (!watching) watch();
  });
  document.addEventListener("model-in-view", () => { if (!document.hidden) watch(); });
  if (!document.hidden) watch();
}

startTheme();
startKey();
startChat();
startYard();
startServer();
startModels();
startTabs();
startWatching();
if (savedKey()) document.dispatchEvent(new Event("key"));
