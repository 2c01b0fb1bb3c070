// Formulas and the colours of code, by two libraries in vendor/ that are loaded when a reply first needs them.
// Neither makes markup of text: one builds MathML elements, the tree of the other is made into elements here.

import { element } from "./net.js";

const MAX_CHARS = 5000;
const MAX_FORMULA_CHARS = 2000;
const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;  // few expansions of these make millions of elements
const MAX_KEPT = 200;
const kept = new Map();  // elements by kind and source: a reply is drawn again with each piece of it
let katex = null, highlighter = null, arePending = new Set();

function keep(key, make) {
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, make());
  }
  return kept.get(key).cloneNode(true);
}

// Load a library once, then fill what has been waiting for it.
async function load(name, get, selector, fill) {
  if (arePending.has(name)) return;
  arePending.add(name);
  try {
    await get();
    for (const each of document.querySelectorAll(selector)) fill(each);
  } catch {
    setTimeout(() => arePending.delete(name), 10000);  // the source is readable as it is
  }
}

const getKatex = () => new Promise((resolve, reject) => {
  const script = element("script", { src: "page/katex.min.js" });
  script.addEventListener("load", () => { katex = window.katex; resolve(); });
  script.addEventListener("error", reject);
  document.head.append(script);
});

const getHighlighter = async () => { highlighter = (await import("./highlight.min.js")).default; };

// `written` is the source with its delimiters, which is shown until the formula is drawn, or where it cannot be.
export function formula(source, isBlock, written) {
  const made = element("span", { className: isBlock ? "formula block" : "formula", textContent: written, title: source });
  if (katex) fillFormula(made); else load("katex", getKatex, ".formula", fillFormula);
  return made;
}

function fillFormula(box) {
  const source = box.title, written = box.textContent;
  if (source.length > MAX_FORMULA_CHARS || DEFINES.test(source)) return;
  const isBlock = box.classList.contains("block");
  box.replaceChildren(keep(`formula ${isBlock} ${written}`, () => {
    const made = element("span");
    try {
      katex.render(source, made, { output: "mathml", displayMode: isBlock, throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20 });
    } catch { made.textContent = written; }
    return made;
  }));
}

export function colour(code) {
  if (highlighter) fillCode(code); else if (code.textContent.length <= MAX_CHARS) load("highlight", getHighlighter, "code[data-language]", fillCode);
}

function fillCode(code) {
  const text = code.textContent, language = code.dataset.language;
  if (text.length > MAX_CHARS || !highlighter.getLanguage(language)) return;
  code.replaceChildren(keep(`code ${language} ${text}`, () => {
    const made = element("span");
    grow(made, highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children);
    return made;
  }));
}

function grow(target, nodes) {
  for (const node of nodes) {
    if (typeof node === "string") { target.append(node); continue; }
    const scope = (node.scope || "").split(".")[0];
    const made = element("span", { className: scope ? `code-${scope}` : "" });
    grow(made, node.children);
    target.append(made);
  }
}
