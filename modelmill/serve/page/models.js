// The served models and their state, from /v1/models and /health, and loading one.
import { $, h, say, trouble } from "./dom.js";
import { call, Refused } from "./api.js";
import { openSettings } from "./settings.js";

const STAGES = { starting: "starting", checking: "checking its files", loading: "reading its weights", "warming up": "warming up" };
const SUFFIXES = { unloaded: "not loaded", loading: "loading", sleeping: "sleeping", unloading: "being unloaded" };
const SOON_MS = 400;
const LATER_MS = 1500;

/** @typedef {any} Card a model of /v1/models */

/** @type {Card[]} */
export let cards = [];
let states = new Map(); // engine → state of /health
let timer = 0;
let changed = () => {};
let chosen = () => /** @type {Card|null} */ (null);

/** State of a model; a server that says nothing has loaded it. @param {Card} card */
const stateOf = (card) => card.state ?? "loaded";

/** Whether a model answers now. @param {Card} card */
export const ready = (card) => (card.state ? card.state === "loaded" : states.get(card.root) === "ready");

/** Read the state again, and soon once more while something changes. */
export async function look() {
  clearTimeout(timer);
  let health = null;
  try {
    health = await (await call("/health")).json();
    states = new Map(health.engines.map((engine) => [engine.name, engine.state]));
    cards = (await (await call("/v1/models")).json()).data;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      banner("The server wants an API key.");
      if (!$("settings").open) openSettings("key");
      return;
    }
    health ??= { status: "away", engines: [] };
  }
  changed();
  show(health);
  const moving = cards.some((card) => ["loading", "unloading"].includes(stateOf(card)));
  if (health.status !== "ok" || moving) timer = setTimeout(look, moving || health.status === "loading" ? SOON_MS : LATER_MS);
}

/** The banner: what keeps the chosen model from answering. */
function show({ status, engines }) {
  $("load").hidden = true;
  if (status === "away") { banner("The server cannot be reached. Trying again …"); return; }
  if (status === "draining") { banner("The server is shutting down."); return; }
  const card = chosen();
  if (card && stateOf(card) !== "loaded") { showState(card); return; }
  if (status === "ok" || card?.state) { banner(""); return; }
  const one = engines.find((engine) => engine.state !== "ready");
  if (!one || one.state === "failed") { banner(`${one?.name ?? "An engine"} has failed. The server's log says why.`); return; }
  const { stage, done, total } = one.progress ?? { stage: "starting" };
  const again = one.state === "restarting" ? "being started again" : "loading";
  banner(`${one.name} is ${again}: ${STAGES[stage] ?? stage}`, total > 1 ? done / total : null);
}

function showState(card) {
  const state = stateOf(card);
  if (state === "unloaded" || state === "sleeping") {
    const word = state === "sleeping" ? "Wake up" : "Load";
    banner(state === "sleeping" ? `${card.id} is sleeping.` : `${card.id} is not loaded.`);
    $("load").hidden = false;
    $("load").textContent = word;
    $("load").setAttribute("aria-label", `${word} ${card.id}`);
    return;
  }
  const percent = Number.isFinite(card.progress) ? ` ${Math.round(100 * card.progress)} %` : " …";
  banner(`${card.id} is ${SUFFIXES[state] ?? state}${state === "loading" ? percent : " …"}`, card.progress ?? null);
}

function banner(text, share) {
  const shown = !$("banner").hidden;
  $("banner").hidden = !text;
  if ($("banner-text").textContent !== text) $("banner-text").textContent = text;
  $("banner-progress").hidden = share === undefined;
  if (share == null) $("banner-progress").removeAttribute("value");
  else $("banner-progress").value = share;
  if (shown && !text) say("Ready");
}

async function load() {
  const card = chosen();
  if (!card) return;
  trouble("");
  $("load").hidden = true;
  banner(`${card.id} is loading …`, null);
  $("message").focus();
  timer = setTimeout(look, SOON_MS); // its progress, while the request may wait for the end
  try {
    await call("/models/load", { model: card.id });
  } catch (error) { trouble(error.message); }
  look();
}

/**
 * Show models in the picker, with the state of those that are not loaded.
 * @param {Card[]} list
 * @param {string|undefined} id of the chosen one
 */
export function fill(list, id) {
  const select = $("model");
  const words = list.map((card) => [card.id, stateOf(card) === "loaded" ? card.id : `${card.id} (${SUFFIXES[card.state] ?? card.state})`]);
  const shown = [...select.options].map((option) => [option.value, option.textContent]);
  if (JSON.stringify(shown) !== JSON.stringify(words)) {
    select.replaceChildren(...words.map(([value, text]) => h("option", { value }, text)));
  }
  if (id) select.value = id;
  select.disabled = list.length < 2;
  select.title = select.value;
}

/**
 * @param {() => void} told is called when the list or a state may have changed
 * @param {() => Card|null} choice the chosen model of the tab that is shown
 */
export function start(told, choice) {
  changed = told;
  chosen = choice;
  $("load").addEventListener("click", load);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
}

/** The chosen model has changed: look at its state. */
export const choose = () => look();
