// A block of code with a copy button. highlight.js is loaded when the first finished block names its language.
import { copied, h } from "./dom.js";
import { copyText } from "./without_https.js";

const MAX_CHARS = 100_000; // longer ones stay plain

let library = null;
let loading = null;

function load() {
  loading ??= import("./vendor/highlight.min.js").then((loaded) => { library = loaded.default; });
  return loading;
}

/** Elements of highlight.js' token tree: its HTML is not used. */
class Builder {
  constructor() { this.places = [document.createDocumentFragment()]; }
  addText(text) { this.places.at(-1).append(text); }
  openNode({ scope }) {
    const name = scope && !scope.startsWith("language:") ? `hl-${scope.split(".")[0]}` : null;
    const made = name ? h("span", { class: name }) : document.createDocumentFragment();
    this.places.push(made);
  }
  closeNode() {
    const made = this.places.pop();
    this.places.at(-1).append(made);
  }
}

function highlight(place, text, language) {
  if (!library.getLanguage(language)) return;
  const builder = new Builder();
  library.highlight(text, { language, ignoreIllegals: true })._emitter.walk(builder);
  place.replaceChildren(builder.places[0]);
}

/**
 * The element of a block of code.
 * @param {string} text
 * @param {string} info what stands behind the fence: the language first
 * @param {boolean} open whether it is still being written; `extend(text)` of the element shows more of it
 * @returns {HTMLElement & {extend: (text: string) => void}}
 */
export function codeBlock(text, info = "", open = false) {
  const language = info.trim().split(/\s+/)[0].toLowerCase();
  let whole = text;
  const data = document.createTextNode(text);
  const place = h("code", {}, data);
  const copy = h("button", { type: "button", "aria-label": "Copy the code", onclick: async () => {
    copied(copy, await copyText(whole));
  } }, "Copy");
  const label = language ? `Code in ${language}` : "Code";
  const made = h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "code"), copy),
    h("pre", { tabindex: "0", role: "region", "aria-label": label }, place));
  made.extend = (more) => {
    if (more.startsWith(whole)) data.appendData(more.slice(whole.length));
    else data.data = more; // what looked like code was the fence that ends it
    whole = more;
  };
  if (!open && language && text.length <= MAX_CHARS) {
    if (library) highlight(place, text, language);
    else load().then(() => highlight(place, text, language), () => {}); // without it, the code stays plain
  }
  return made;
}
