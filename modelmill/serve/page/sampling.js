// The fields of sampling in the settings.
import { $, h } from "./dom.js";
import { keep, kept } from "./storage.js";

/** @type {[string, string, number, number, number, string][]} field, label, minimum, maximum, step, hint */
const KNOBS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 is always the same answer"],
  ["top_p", "Top-p", 0, 1, 0.01, ""],
  ["top_k", "Top-k", 0, 1000, 1, "0 is off"],
  ["min_p", "Min-p", 0, 1, 0.01, ""],
  ["repetition_penalty", "Repetition penalty", 0.1, 3, 0.05, ""],
  ["max_tokens", "Max tokens", 1, 1000000, 1, "of an answer"],
  ["seed", "Seed", 0, 4294967295, 1, "the same answer again"],
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);

// The model's sampling defaults, from the server. If the checkpoint has none, API clients get OpenAI's defaults, and users
// of this page get these, as a group, if they set none of them.
let suggested = null;

/**
 * Show a model's defaults as placeholders.
 * @param {any} defaults suggested_sampling of the model's card
 */
export function suggest(defaults) {
  suggested = defaults;
  for (const [name] of KNOBS) {
    const own = suggested?.source !== "modelmill" || name in unsaid();
    $(`knob-${name}`).placeholder = String(own ? suggested?.values?.[name] ?? "default" : "default");
  }
  $("default-sampling").textContent = suggested ? `Left empty: ${suggested.text}` : "";
}

/** Values sent for fields that are not set. @returns {Record<string, number>} */
export function unsaid() {
  if (suggested?.source !== "modelmill") return {};
  const set = sampling();
  return Object.keys(suggested.values).some((name) => name in set) ? {} : suggested.values;
}

/** Only fields that are set: the server applies a model's own defaults. @returns {Record<string, number>} */
export function sampling() {
  /** @type {Record<string, number>} */
  const found = {};
  for (const [name] of KNOBS) {
    const input = $(`knob-${name}`);
    if (input.value === "" || !input.checkValidity()) continue;
    found[name] = WHOLE.has(name) ? Math.round(Number(input.value)) : Number(input.value);
  }
  return found;
}

/** Show what is kept. */
export function showSampling() {
  const values = kept("sampling") ?? {};
  for (const [name] of KNOBS) $(`knob-${name}`).value = values[name] ?? "";
  suggest(suggested);
}

export function resetSampling() {
  for (const [name] of KNOBS) $(`knob-${name}`).value = "";
}

export function rememberSampling() {
  suggest(suggested);
  keep("sampling", sampling());
}

export function startSampling() {
  for (const [name, label, min, max, , hint] of KNOBS) {
    const input = h("input", { id: `knob-${name}`, type: "number", min, max, step: WHOLE.has(name) ? 1 : "any",
      placeholder: "default", title: hint || null, inputmode: WHOLE.has(name) ? "numeric" : "decimal" });
    $("knobs").append(h("div", {}, h("label", { for: input.id }, label), input));
  }
}
