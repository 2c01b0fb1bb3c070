// Pictures and text files for the next message: chosen, dropped or pasted, shown before they are sent, taken back by a click.

import { element } from "./net.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
export const MOST_FILES = 8, MOST_BYTES = 256 * 1024;
export const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

// Thumbnails of data URLs; with `remove` each is a button that calls it with its place.
export function thumbnails(urls, remove) {
  return urls.map((src, place) => {
    const image = element("img", { src, alt: `Picture ${place + 1}`, className: "thumbnail" });
    if (!remove) return image;
    const button = element("button", { type: "button", title: "Take this picture back", className: "quiet" }, image);
    button.addEventListener("click", () => remove(place));
    return button;
  });
}

// Text files as a message has them: the name and the text of each, to be unfolded.
export function folded(files) {
  return files.map(({ name, text }) => element("details", { className: "file" }, element("summary", { textContent: `${name} · ${size(text)}` }), element("pre", { textContent: text })));
}

const size = (text) => (text.length < 1024 ? `${text.length} characters` : `${Math.round(text.length / 1024)}k characters`);

// A fence that no run of backticks in the text ends.
function fenced(text) {
  const longest = [...text.matchAll(/`+/g)].reduce((most, [run]) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

// The content of a message: its text behind its files, and its pictures before both.
export function contentOf({ content, pictures, files }) {
  const text = [...(files ?? []).map((file) => `${file.name}:\n${fenced(file.text)}`), content].filter((part) => part.trim()).join("\n\n");
  if (!pictures?.length) return text;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export class Attached {
  #urls = [];
  #files = [];
  #box;
  #note;
  #seesPictures;

  // Files that are dropped on `target`, or pasted into it; pictures while `seesPictures()`. Refusals are shown in `note`.
  constructor({ box, note, target, seesPictures }) {
    this.#box = box;
    this.#note = note;
    this.#seesPictures = seesPictures;
    target.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    target.addEventListener("drop", (event) => this.#given(event, event.dataTransfer));
    target.addEventListener("paste", (event) => {
      // Some programs put a picture of a text next to the text.
      if (seesPictures() || !event.clipboardData?.types.includes("text/plain")) this.#given(event, event.clipboardData);
    });
  }

  take() {
    const taken = { pictures: this.#urls, files: this.#files };
    this.#urls = [];
    this.#files = [];
    this.#tell("");
    this.#draw();
    return taken;
  }

  add(files) {
    this.#tell("");
    for (const file of files) if (KINDS.includes(file.type)) this.#addPicture(file); else this.#addText(file);
  }

  #given(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.add([...data.files]);
  }

  #addPicture(file) {
    if (!this.#seesPictures()) { this.#tell(`${file.name}: this model sees no pictures.`); return; }
    const reader = new FileReader();
    reader.addEventListener("load", () => { this.#urls.push(reader.result); this.#draw(); });
    reader.readAsDataURL(file);
  }

  async #addText(file) {
    if (file.size > MOST_BYTES) { this.#tell(`${file.name} is longer than ${MOST_BYTES / 1024} KiB.`); return; }
    let text;
    try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { text = "\0"; }
    if (text.includes("\0")) { this.#tell(`${file.name} is no text in UTF-8${file.type.startsWith("image/") ? ", and no picture that is read here" : ""}.`); return; }
    if (!text.trim()) { this.#tell(`${file.name} is empty.`); return; }
    if (this.#files.length === MOST_FILES) { this.#tell(`A message takes ${MOST_FILES} files.`); return; }
    this.#files.push({ name: file.name.replaceAll(/\s+/g, " ").slice(0, 200), text });
    this.#draw();
  }

  #tell(text) { this.#note.textContent = text; this.#note.hidden = !text; }

  #draw() {
    this.#box.hidden = !this.#urls.length && !this.#files.length;
    const chips = this.#files.map(({ name, text }, place) => {
      const chip = element("button", { type: "button", className: "chip", title: "Take this file back", textContent: `${name} · ${size(text)} ✕` });
      chip.addEventListener("click", () => { this.#files.splice(place, 1); this.#draw(); });
      return chip;
    });
    this.#box.replaceChildren(...thumbnails(this.#urls, (place) => { this.#urls.splice(place, 1); this.#draw(); }), ...chips);
  }
}
