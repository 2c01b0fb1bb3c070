// Markdown as models write it, to elements. Text is only ever set as text: no markup of a reply is interpreted.

import { colour, formula } from "./decorate.js";
import { copy, element } from "./net.js";

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*|__([^\s_](?:[\s\S]*?[^\s_])?)__|\*([^\s*](?:[^*]*[^\s*])?)\*|~~([^~]+)~~|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|\$\$([^$]+)\$\$|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\]|\$([^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])/;

function inline(target, text) {
  let rest = text;
  for (let num = 0; num < 2000; num += 1) {
    const found = INLINE.exec(rest);
    if (!found) break;
    target.append(rest.slice(0, found.index));
    const [whole, , code, bold, bold2, italic, struck, label, url, block, round, square, dollar] = found;
    if (code !== undefined) target.append(element("code", { textContent: code.trim() || code }));
    else if (bold ?? bold2) target.append(nested("strong", bold ?? bold2));
    else if (italic) target.append(nested("em", italic));
    else if (block ?? square) target.append(formula(block ?? square, true, whole));
    else if (round ?? dollar) target.append(formula(round ?? dollar, false, whole));
    else if (struck) target.append(nested("del", struck));
    else target.append(element("a", { href: url, textContent: label, rel: "noopener noreferrer", target: "_blank", title: url }));
    rest = rest.slice(found.index + whole.length);
  }
  target.append(rest);
}

function nested(tag, text) {
  const made = element(tag);
  inline(made, text);
  return made;
}

export function codeBlock(text, language) {
  const button = element("button", { type: "button", textContent: "Copy" });
  button.addEventListener("click", () => copy(text, button));
  const code = element("code", { textContent: text });
  if (language) { code.setAttribute("data-language", language.toLowerCase()); colour(code); }
  return element("div", { className: "code" }, element("pre", { tabIndex: 0 }, code), button);
}

const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const OPENS = /^\s*(\$\$|\\\[)(.*)$/;
const MAX_FORMULA_LINES = 50;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;

// Replace the children of `target` by the rendered text.
export function render(target, text) {
  const lines = text.split("\n");
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), display = displayed(lines, at);
    if (fence) {
      const close = new RegExp(`^\\s{0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      let end = at + 1;
      while (end < lines.length && !close.test(lines[end])) end += 1;
      made.push(codeBlock(lines.slice(at + 1, end).join("\n"), end < lines.length ? fence[2] : ""));  // colours once it is whole
      at = end + 1;
    } else if (display) {
      made.push(display.paragraph);
      at = display.end + 1;
    } else if (!line.trim()) {
      at += 1;
    } else if (HEADING.test(line)) {
      const [, marks, words] = HEADING.exec(line);
      made.push(nested(`h${Math.min(marks.length + 1, 4)}`, words));
      at += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      made.push(element("hr"));
      at += 1;
    } else if (line.startsWith(">")) {
      const quoted = [];
      while (at < lines.length && lines[at].startsWith(">")) { quoted.push(lines[at].replace(/^>\s?/, "")); at += 1; }
      const quote = element("blockquote");
      inline(quote, quoted.join("\n"));
      made.push(quote);
    } else if (ITEM.test(line)) {
      at = list(lines, at, made);
    } else if (ROW.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[at + 1] || "")) {
      at = table(lines, at, made);
    } else {
      const words = [line];
      at += 1;
      while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !OPENS.test(lines[at]) && !HEADING.test(lines[at]) && !ITEM.test(lines[at])) { words.push(lines[at]); at += 1; }
      const paragraph = element("p");
      words.forEach((each, place) => { if (place) paragraph.append(element("br")); inline(paragraph, each); });
      made.push(paragraph);
    }
  }
  target.replaceChildren(...made);
}

// The paragraph that begins with the formula of a line of its own, and its last line; null where there is none.
function displayed(lines, from) {
  const [, open, first] = OPENS.exec(lines[from]) ?? [];
  if (!open) return null;
  const close = open === "$$" ? "$$" : "\\]";
  const inside = [];
  for (let end = from, line = first; end - from < MAX_FORMULA_LINES; line = lines[end]) {
    const at = line.indexOf(close);
    inside.push(at < 0 ? line : line.slice(0, at));
    if (at >= 0) {
      const source = inside.join("\n");
      const paragraph = element("p", {}, formula(source.trim(), true, open + source + close));
      inline(paragraph, line.slice(at + close.length));
      return { paragraph, end };
    }
    end += 1;
    if (!lines[end]?.trim() || FENCE.test(lines[end])) return null;
  }
  return null;
}

function list(lines, from, made) {
  let at = from;
  const stack = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item) {
      if (!lines[at].trim() || !/^\s+/.test(lines[at]) || !stack.length) break;
      stack.at(-1).list.lastElementChild.append(" ");
      inline(stack.at(-1).list.lastElementChild, lines[at].trim());
      at += 1;
      continue;
    }
    const indent = item[1].length;
    while (stack.length > 1 && indent < stack.at(-1).indent) stack.pop();
    if (!stack.length || indent > stack.at(-1).indent + 1) {
      const isNumbered = /\d/.test(item[2]);
      const made2 = element(isNumbered ? "ol" : "ul");
      if (isNumbered) made2.start = parseInt(item[2], 10);
      if (stack.length) stack.at(-1).list.lastElementChild.append(made2); else made.push(made2);
      stack.push({ list: made2, indent });
    }
    stack.at(-1).list.append(nested("li", item[3]));
    at += 1;
  }
  return at;
}

function table(lines, from, made) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const body = element("table");
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => nested(tag, cell)));
  body.append(row(lines[from], "th"));
  let at = from + 2;
  while (at < lines.length && ROW.test(lines[at])) { body.append(row(lines[at], "td")); at += 1; }
  made.push(body);
  return at;
}
