// The system prompt, and named ones that are kept as presets.
import { $, h } from "./dom.js";
import { keep, kept } from "./storage.js";

/** @typedef {{name: string, text: string}} Preset */

/** @returns {Preset[]} by name */
const presets = () => kept("presets") ?? [];

let changed = () => {};

/** @returns {string} */
export const systemPrompt = () => $("system").value;

/** Show another system prompt: of the conversation that is opened. @param {string} text */
export function showSystemPrompt(text) {
  $("system").value = text;
  keep("system", text);
  drawPresets();
}

/** Show what is kept. */
export function drawPresets() {
  const all = presets();
  const fitting = all.find(({ text }) => text === systemPrompt());
  $("preset").replaceChildren(h("option", { value: "" }, all.length ? "No preset" : "No presets yet"),
    ...all.map(({ name }) => h("option", { value: name }, name)));
  $("preset").value = fitting?.name ?? "";
  $("preset").disabled = !all.length;
  $("preset-delete").disabled = !fitting;
  $("preset-save").disabled = !systemPrompt().trim() || !$("preset-name").value.trim();
}

function choose() {
  const chosen = presets().find(({ name }) => name === $("preset").value);
  showSystemPrompt(chosen?.text ?? "");
  changed();
}

function add() {
  const name = $("preset-name").value.trim();
  const others = presets().filter((each) => each.name !== name);
  keep("presets", [...others, { name, text: systemPrompt() }].sort((a, b) => a.name.localeCompare(b.name)));
  $("preset-name").value = "";
  drawPresets();
  $("preset").focus();
}

function remove() {
  keep("presets", presets().filter(({ name }) => name !== $("preset").value));
  drawPresets();
  $("preset").focus();
}

/** @param {() => void} told is called when the user has changed the system prompt */
export function startPresets(told) {
  changed = told;
  $("system").value = kept("system") ?? "";
  $("system").addEventListener("input", () => { keep("system", systemPrompt()); drawPresets(); changed(); });
  $("preset").addEventListener("change", choose);
  $("preset-name").addEventListener("input", drawPresets);
  $("preset-name").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the dialog stays open
    if (!$("preset-save").disabled) add();
  });
  $("preset-save").addEventListener("click", add);
  $("preset-delete").addEventListener("click", remove);
  drawPresets();
}
