// Pictures for the next message: dropped or pasted, shown before they are sent, taken back by a click.

import { element } from "./net.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
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

// The content of a message: a text, or its pictures with the text behind them.
export function contentOf({ content, pictures }) {
  if (!pictures?.length) return content;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return content.trim() ? [...parts, { type: "text", text: content }] : parts;
}

export class Attached {
  #urls = [];
  #box;

  // Pictures that are dropped on `target`, or pasted into it, while `isWanted()`.
  constructor(box, target, isWanted) {
    this.#box = box;
    target.addEventListener("dragover", (event) => { if (isWanted()) event.preventDefault(); });
    for (const [name, data] of [["drop", "dataTransfer"], ["paste", "clipboardData"]]) {
      target.addEventListener(name, (event) => {
        const files = [...(event[data]?.files ?? [])].filter((file) => KINDS.includes(file.type));
        if (!files.length || !isWanted()) return;
        event.preventDefault();
        files.forEach((file) => this.#add(file));
      });
    }
  }

  take() {
    const taken = this.#urls;
    this.#urls = [];
    this.#draw();
    return taken;
  }

  #add(file) {
    const reader = new FileReader();
    reader.addEventListener("load", () => { this.#urls.push(reader.result); this.#draw(); });
    reader.readAsDataURL(file);
  }

  #draw() {
    this.#box.hidden = !this.#urls.length;
    this.#box.replaceChildren(...thumbnails(this.#urls, (place) => { this.#urls.splice(place, 1); this.#draw(); }));
  }
}
