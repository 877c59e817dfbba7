// User settings. Sampling and appearance are stored permanently, key and conversation until the tab is closed.
import { $, h } from "./dom.js";

const KNOBS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 is always the same answer"],
  ["top_p", "Top-p", 0.01, 1, 0.01, ""],
  ["top_k", "Top-k", 0, 1000, 1, "0 is off"],
  ["min_p", "Min-p", 0, 1, 0.01, ""],
  ["repetition_penalty", "Repetition penalty", 0.1, 3, 0.05, ""],
  ["max_tokens", "Most tokens", 1, 1000000, 1, ""],
  ["seed", "Seed", 0, 4294967295, 1, "the same answer again"],
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);
const LASTING = new Set(["sampling", "theme"]);

const shelf = (name) => (LASTING.has(name) ? localStorage : sessionStorage);

export function kept(name) {
  try { return JSON.parse(shelf(name).getItem(`modelmill.${name}`)); } catch { return null; }
}

export function keep(name, value) {
  try {
    shelf(name).setItem(`modelmill.${name}`, JSON.stringify(value));
    return true;
  } catch { return false; } // the storage is full or disabled
}

// The model's sampling defaults, from the server. If the checkpoint has none, API clients get OpenAI's defaults, and users
// of this page get these, as a group, if they set none of them.
let suggested = null;

export function suggest(told) {
  suggested = told;
  for (const [name] of KNOBS) {
    const own = suggested?.source !== "modelmill" || name in unsaid();
    $(`knob-${name}`).placeholder = String(own ? suggested?.values?.[name] ?? "default" : "default");
  }
  $("default-sampling").textContent = suggested ? `Left empty: ${suggested.text}` : "";
}

// Values sent for fields that are not set.
export function unsaid() {
  if (suggested?.source !== "modelmill") return {};
  const set = sampling();
  return Object.keys(suggested.values).some((name) => name in set) ? {} : suggested.values;
}

// Only fields that are set: the server applies a model's own defaults.
export function sampling() {
  const found = {};
  for (const [name] of KNOBS) {
    const input = $(`knob-${name}`);
    if (input.value === "" || !input.checkValidity()) continue;
    found[name] = WHOLE.has(name) ? Math.round(Number(input.value)) : Number(input.value);
  }
  return found;
}

function show(values) {
  for (const [name] of KNOBS) $(`knob-${name}`).value = values[name] ?? "";
}

function remember() {
  suggest(suggested);
  keep("sampling", sampling());
  keep("system", $("system").value);
  keep("key", $("key").value.trim());
  keep("theme", $("theme").value);
  document.documentElement.dataset.theme = $("theme").value;
}

export function openSettings(focus) {
  $("settings").showModal();
  if (focus) $(focus).focus();
}

export function start(changed) {
  for (const [name, label, min, max, step, hint] of KNOBS) {
    const input = h("input", { id: `knob-${name}`, type: "number", min, max, step: WHOLE.has(name) ? 1 : "any",
      placeholder: "default", title: hint || null, inputmode: WHOLE.has(name) ? "numeric" : "decimal" });
    $("knobs").append(h("div", {}, h("label", { for: input.id }, label), input));
  }
  show(kept("sampling") || {});
  $("system").value = kept("system") || "";
  $("key").value = kept("key") || "";
  $("theme").value = kept("theme") || "";
  document.documentElement.dataset.theme = $("theme").value;
  $("open-settings").addEventListener("click", () => openSettings());
  $("settings").addEventListener("input", remember);
  $("defaults").addEventListener("click", () => { show({}); $("system").value = ""; remember(); });
  $("settings").addEventListener("close", () => { remember(); changed(); });
  $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
}
