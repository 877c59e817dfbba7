// Calls of tools as cards, and the fields for their results.
import { h } from "./dom.js";
import { codeBlock } from "./code.js";

/** @typedef {import("./tree.js").ToolCall} ToolCall */

/** JSON with line breaks; text that is no JSON (yet) stays as it is. */
function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/**
 * Cards of calls.
 * @param {ToolCall[]} calls
 * @param {boolean} open whether they are still being written
 * @returns {HTMLElement[]}
 */
export const cards = (calls, open) => calls.filter(Boolean).map(({ name, arguments: given }) =>
  h("section", { class: "tool-call", "aria-label": `Call of ${name}` },
    h("p", {}, "Calls ", h("strong", {}, name)), codeBlock(open ? given : pretty(given), "json", open)));

/**
 * Fields for the results of calls.
 * @param {ToolCall[]} calls
 * @param {(results: string[]) => void} send is called with one result for each call
 * @returns {HTMLElement}
 */
export function resultForm(calls, send) {
  const fields = calls.map((_, i) => h("textarea", { rows: 3, id: `result-${i}`, placeholder: "What the tool returned" }));
  const label = ({ name }, i) => `Result of ${name}${calls.length > 1 ? ` (${i + 1} of ${calls.length})` : ""}`;
  const button = h("button", { class: "solid", "data-asks": true }, calls.length > 1 ? "Send results" : "Send result");
  const form = h("form", { class: "tool-results" },
    ...calls.map((call, i) => h("div", {}, h("label", { for: `result-${i}` }, label(call, i)), fields[i])), button);
  form.addEventListener("submit", (event) => { event.preventDefault(); send(fields.map((field) => field.value)); });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(button); }
  });
  return form;
}
