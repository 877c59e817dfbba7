// Draws formulas with KaTeX, which is loaded when the first one is there. Until then, and if it is wrong, its source is shown.
import { h } from "./dom.js";

const MAX_DRAWN = 2000; // formulas that are remembered: an answer is drawn again and again while it grows

let katex = null;
let loading = null;
const drawn = new Map(); // source with its kind → the drawing, in the order of their first use

function load() {
  loading ??= import("./vendor/katex.min.js").then(() => {
    document.head.append(h("link", { rel: "stylesheet", href: "/page/vendor/katex.min.css" }));
    katex = /** @type {any} */ (globalThis).katex;
  });
  return loading;
}

function draw(place, source, display) {
  const key = `${display}${source}`;
  const known = drawn.get(key);
  if (known) {
    place.replaceChildren(known.cloneNode(true));
    return;
  }
  try {
    // without `trust`, no command of a formula makes links, loads pictures or sets attributes
    katex.render(source, place, { displayMode: display, throwOnError: true, strict: "ignore", maxExpand: 500, maxSize: 40 });
    drawn.set(key, place.firstChild.cloneNode(true));
    if (drawn.size > MAX_DRAWN) drawn.delete(drawn.keys().next().value);
  } catch {
    place.textContent = source;
    place.classList.add("wrong");
  }
}

/**
 * The element of a formula.
 * @param {string} source TeX
 * @param {boolean} display on a line of its own
 * @returns {HTMLElement}
 */
export function formula(source, display) {
  const place = h("span", { class: display ? "math display" : "math", tabindex: display ? "0" : null }, source);
  if (katex) draw(place, source, display);
  else load().then(() => draw(place, source, display), () => place.classList.add("wrong"));
  return place;
}
