// Creates elements; text is always set as text, so no part of an answer is parsed as HTML.

/**
 * The element with this id, which index.html has.
 * @param {string} id
 * @returns {any}
 */
export const $ = (id) => document.getElementById(id);

/**
 * Create an element.
 * @param {string} tag
 * @param {Record<string, any>} given attributes; `on…` are listeners, `true` is an empty attribute, `false` and null none
 * @param {...(Node|string|null|undefined)} children
 * @returns {any}
 */
export function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(.../** @type {(Node|string)[]} */ (children.filter((child) => child != null)));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  more: "M6 12h.01M12 12h.01M18 12h.01",
  left: "m14 7-5 5 5 5",
  right: "m10 7 5 5-5 5",
  close: "m7 7 10 10M17 7 7 17",
  file: "M7 4h7l4 4v12H7zM14 4v4h4",
};

/**
 * A drawing that says nothing to screen readers.
 * @param {keyof typeof ICONS} name
 * @returns {SVGElement}
 */
export function icon(name) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  drawing.append(path);
  return drawing;
}

/**
 * A button of a message.
 * @param {string} name its text
 * @param {string} label its accessible name, which begins with the text
 * @param {(event: any) => void} run
 * @param {boolean} asks whether it sends a request, which is possible only while none runs
 * @returns {HTMLButtonElement}
 */
export function act(name, label, run, asks = false) {
  return h("button", { type: "button", "aria-label": label, onclick: run, "data-asks": asks }, name);
}

/**
 * A copy button tells for a moment what happened, by its text and its accessible name.
 * @param {HTMLButtonElement} button
 * @param {boolean} done
 */
export function copied(button, done) {
  const name = button.getAttribute("aria-label");
  if (name === null) return; // it still tells of the last time
  button.textContent = done ? "Copied" : "Not copied";
  button.removeAttribute("aria-label");
  setTimeout(() => { button.textContent = "Copy"; button.setAttribute("aria-label", name); }, 1500);
}

/**
 * Announce a text to screen readers, in place of earlier ones.
 * @param {string} text
 */
export const say = (text) => { $("voice").textContent = text; };

/**
 * Announce a further text: of an answer, block by block.
 * @param {string} text
 */
export function sayMore(text) {
  const voice = $("voice");
  if (!text.trim()) return;
  voice.append(h("p", {}, text));
  while (voice.childNodes.length > 20) voice.firstChild.remove();
}

/**
 * Show a problem in one line; an empty text removes it.
 * @param {string} text
 */
export function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble-text").textContent = text || "";
}

$("trouble-close").addEventListener("click", () => trouble(""));

/**
 * Save a file on the user's disk.
 * @param {Blob} blob
 * @param {string} name
 */
export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/**
 * A dialog closes by a click beside it; Esc is the browser's.
 * @param {HTMLDialogElement} dialog
 */
export function closeByBackdrop(dialog) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
