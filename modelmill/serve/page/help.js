// Keyboard shortcuts, and the dialog that lists them.
import { $, closeByBackdrop, h } from "./dom.js";

/** @typedef {{keys: string, text: string, code?: string, run?: () => void}} Shortcut code: of a KeyboardEvent with Alt */

/**
 * Show the shortcuts in the dialog, and listen to those with Alt.
 * @param {Shortcut[]} shortcuts
 */
export function start(shortcuts) {
  $("shortcuts").append(...shortcuts.map(({ keys, text }) => h("div", {},
    h("dt", {}, ...keys.split(" ").flatMap((key, i) => [i ? " + " : "", h("kbd", {}, key)])), h("dd", {}, text))));
  $("open-help").addEventListener("click", () => $("help").showModal());
  closeByBackdrop($("help"));
  document.addEventListener("keydown", (event) => {
    if (!event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
    const found = shortcuts.find(({ code }) => code === event.code);
    if (!found?.run) return;
    event.preventDefault();
    found.run();
  });
}
