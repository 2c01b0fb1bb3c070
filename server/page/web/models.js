// The models at this address: which is in view in the yard and on the server tab, and what is loaded.

import { ask, element } from "./net.js";

const byId = (id) => document.getElementById(id);
const EVERY_MS = 1000;
let models = [], viewed = "", timer = 0;

// The model in view, as the query of a request; empty where there is one model.
export const inView = () => (models.length > 1 && viewed ? `?model=${encodeURIComponent(viewed)}` : "");

export function startModels() {
  for (const id of ["yard-model", "server-model"]) {
    byId(id).addEventListener("change", () => { viewed = byId(id).value; choose(); document.dispatchEvent(new Event("model-in-view")); });
  }
  document.addEventListener("key", look);
  document.addEventListener("shown", look);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
}

// Ask for the list, and again while the server tab shows models that come and go, or after a failure that may pass.
async function look() {
  clearTimeout(timer);
  let isAgain;
  try {
    const listed = (await (await ask("/models")).json()).data || [];
    models = listed.filter((each) => each.id === each.root && !each.parent);  // neither other names nor adapters
    choose();
    draw();
    isAgain = !byId("server").hidden && models.some((each) => each.status);
  } catch (error) {
    isAgain = ![401, 403, 404].includes(error.status);
  }
  clearTimeout(timer);  // of another look that was under way
  if (isAgain && !document.hidden) timer = setTimeout(look, EVERY_MS);
}

function choose() {
  if (!models.some((each) => each.id === viewed)) viewed = models[0]?.id ?? "";
  for (const id of ["yard-model", "server-model"]) {
    const names = [...byId(id).options].map((each) => each.value);
    if (names.join() !== models.map((each) => each.id).join()) byId(id).replaceChildren(...models.map((each) => element("option", { value: each.id, textContent: each.id })));
    byId(id).value = viewed;
    byId(id).parentElement.hidden = models.length < 2;
  }
}

const words = ({ value, progress, reason }) => (value === "loading" ? `loading, ${Math.round((progress ?? 0) * 100)} %` : reason ? `failed: ${reason}` : value);

function draw() {
  const shown = models.filter((each) => each.status);
  byId("models-card").hidden = !shown.length;
  if (byId("models").contains(document.activeElement)) {  // a button that is in use keeps its focus
    for (const each of shown) { const cell = byId("models").querySelector(`[data-model="${CSS.escape(each.id)}"]`); if (cell) cell.textContent = words(each.status); }
    return;
  }
  const head = element("tr", {}, ...["model", "state", "by hand"].map((text) => element("th", { textContent: text })));
  byId("models").replaceChildren(head, ...shown.map((each) => {
    const state = element("td", { textContent: words(each.status) });
    state.dataset.model = each.id;
    return element("tr", {}, element("td", { textContent: each.id }), state, element("td", {}, act("Load", "load", each.id), " ", act("Unload", "unload", each.id)));
  }));
}

function act(text, route, model) {
  const button = element("button", { type: "button", textContent: text, ariaLabel: `${text} ${model}` });
  button.addEventListener("click", async () => {
    try {
      await ask(`/models/${route}`, { method: "POST", body: { model } });
      byId("models-note").textContent = route === "load" ? `${model} is loaded as soon as there is room.` : `${model} leaves once no request uses it.`;
    } catch (error) {
      byId("models-note").textContent = error.message;
    }
    look();
  });
  return button;
}
