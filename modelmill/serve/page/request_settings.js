// Settings of requests other than sampling: thinking, stop strings, the form of the answer, tools.
import { $ } from "./dom.js";
import { keep, kept } from "./storage.js";

const FIELDS = ["thinking", "stop-strings", "format", "schema", "tools", "tool-choice"];
const MAX_STOPS = 64; // of the server

/** A setting that no request can be made of; `field` is the id of its element. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function parsed(field, name) {
  try {
    return JSON.parse($(field).value);
  } catch (error) {
    throw new SettingError(field, `${name} in the settings must be JSON: ${error.message}`);
  }
}

/** One stop string a line; \n, \t and \\ stand for a line break, a tab and a backslash. */
function stops() {
  const signs = { n: "\n", t: "\t", "\\": "\\" };
  const found = $("stop-strings").value.split("\n").filter(Boolean)
    .map((line) => line.replace(/\\([nt\\])/g, (_, sign) => signs[sign]));
  if (found.length > MAX_STOPS) throw new SettingError("stop-strings", `There are ${found.length} stop strings; the limit is ${MAX_STOPS}.`);
  return found.length ? { stop: found } : {};
}

function format() {
  if ($("format").value === "json_object") return { response_format: { type: "json_object" } };
  if ($("format").value !== "json_schema") return {};
  const schema = parsed("schema", "The schema");
  if (schema === null || typeof schema !== "object") throw new SettingError("schema", "The schema in the settings must be a JSON object.");
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

/** Definitions in OpenAI's form; a bare function is put into it. */
function tools() {
  if (!$("tools").value.trim()) return {};
  const given = parsed("tools", "The tools");
  const list = Array.isArray(given) ? given : [given];
  const found = list.map((each) => (each?.function ? each : { type: "function", function: each }));
  if (!found.length) return {};
  if (!found.every((each) => typeof each.function?.name === "string")) {
    throw new SettingError("tools", "Each tool in the settings needs a name.");
  }
  const choice = $("tool-choice").value;
  return { tools: found, ...(choice === "auto" ? {} : { tool_choice: choice }) };
}

function thinking() {
  const choice = $("thinking").value;
  return choice ? { chat_template_kwargs: { enable_thinking: choice === "on" } } : {};
}

/** Whether answers must have a form, so that one that was cut cannot be continued. */
export const hasFormat = () => $("format").value !== "";

/**
 * Fields of a request; only those that the user has set.
 * @param {boolean} continues the last answer
 * @returns {object}
 * @throws {SettingError}
 */
export function requestSettings(continues = false) {
  return { ...thinking(), ...stops(), ...(continues ? {} : format()), ...tools() };
}

function check() {
  $("schema-row").hidden = $("format").value !== "json_schema";
  for (const [field, read] of /** @type {[string, () => object][]} */ ([["schema", format], ["tools", tools], ["stop-strings", stops]])) {
    let problem = "";
    try { if (field !== "schema" || $("schema").value.trim()) read(); } catch (error) { problem = error.message; }
    $(field).setAttribute("aria-invalid", String(Boolean(problem)));
    $(`${field}-problem`).textContent = problem;
  }
}

export function rememberRequestSettings() {
  for (const field of FIELDS) keep(field, $(field).value);
  check();
}

export function resetRequestSettings() {
  for (const field of FIELDS) $(field).value = field === "tool-choice" ? "auto" : "";
}

/** Show what is kept. */
export function showRequestSettings() {
  for (const field of FIELDS) $(field).value = kept(field) ?? (field === "tool-choice" ? "auto" : "");
  check();
}
