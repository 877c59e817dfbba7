// Ids and the clipboard. Browsers offer crypto.randomUUID and navigator.clipboard over https and on localhost only; a phone
// reads this page over plain http from another machine.
import { h } from "./dom.js";

const ID_BYTES = 16;

/** A new random id. @returns {string} */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(ID_BYTES))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Copy by a selection. @param {string} text @returns {boolean} */
function copySelection(text) {
  const focused = /** @type {HTMLElement|null} */ (document.activeElement);
  const field = h("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

/**
 * Copy a text.
 * @param {string} text
 * @returns {Promise<boolean>} false: the browser does not allow it
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}
