// The served models, their state, and the tabs.
import { $, h, say } from "./dom.js";
import { call, Refused } from "./api.js";
import * as chat from "./chat.js";
import * as segment from "./segment.js";
import * as settings from "./settings.js";

const STAGES = { starting: "starting", checking: "checking its files", loading: "reading its weights", "warming up": "warming up" };

let cards = []; // models of /v1/models
let states = new Map(); // engine → state of /health
let timer = 0;
const picked = { chat: "", segment: "" }; // selected model of each tab

const sees = (card) => card.engine_type === "segmentation";
const ready = (card) => states.get(card.root) === "ready";

async function look() {
  clearTimeout(timer);
  let health = null;
  try {
    health = await (await call("/health")).json();
    states = new Map(health.engines.map((engine) => [engine.name, engine.state]));
    cards = (await (await call("/v1/models")).json()).data;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      banner("The server wants an API key.");
      if (!$("settings").open) settings.openSettings("key");
      return;
    }
    if (!health) health = { status: "away", engines: [] };
  }
  told(health);
  models();
  if (health.status !== "ok") timer = setTimeout(look, health.status === "loading" ? 400 : 1500);
}

function told({ status, engines }) {
  if (status === "ok") { banner(""); return; }
  if (status === "away") { banner("The server cannot be reached. Trying again …"); return; }
  if (status === "draining") { banner("The server is shutting down."); return; }
  const one = engines.find((engine) => engine.state !== "ready");
  if (!one || one.state === "failed") { banner(`${one?.name ?? "An engine"} has failed. The server's log says why.`); return; }
  const { stage, done, total } = one.progress ?? { stage: "starting" };
  const again = one.state === "restarting" ? "being started again" : "loading";
  banner(`${one.name} is ${again}: ${STAGES[stage] ?? stage}`, total > 1 ? done / total : null);
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

function models() {
  const segments = cards.filter(sees);
  const writes = cards.filter((card) => card.engine_type && !sees(card)).sort((a, b) => (a.chat === false) - (b.chat === false));
  const unknown = cards.filter((card) => !card.engine_type);
  $("tabs").hidden = !(segments.length && (writes.length || unknown.length));
  if (segments.length && !writes.length && !unknown.length) show("segment");
  const tab = $("segment").hidden ? "chat" : "segment";
  const writer = named([...writes, ...unknown], picked.chat);
  const viewer = named(segments, picked.segment);
  fill(tab === "chat" ? [...writes, ...unknown] : segments, (tab === "chat" ? writer : viewer)?.id);
  chat.use(writer ? { id: writer.id, ready: ready(writer) && writer.chat !== false, talks: writer.chat !== false, pictures: writer.input_modalities?.includes("image"), suggested: writer.suggested_sampling } : null);
  segment.use(viewer ? { id: viewer.id, ready: ready(viewer) } : null);
}

const named = (list, id) => list.find((card) => card.id === id) ?? list[0];

function fill(list, id) {
  const select = $("model");
  if ([...select.options].map((option) => option.value).join("\n") !== list.map((card) => card.id).join("\n")) {
    select.replaceChildren(...list.map((card) => h("option", { value: card.id }, card.id)));
  }
  if (id) select.value = id;
  select.disabled = list.length < 2;
  select.title = select.value;
}

function show(name) {
  for (const each of ["chat", "segment"]) {
    const on = each === name;
    $(each).hidden = !on;
    $(`tab-${each}`).setAttribute("aria-selected", String(on));
    $(`tab-${each}`).tabIndex = on ? 0 : -1;
  }
  $("fresh").hidden = name !== "chat";
  document.querySelector(".skip").href = name === "chat" ? "#message" : "#choose";
}

function tabs() {
  const all = ["chat", "segment"];
  for (const name of all) {
    $(`tab-${name}`).addEventListener("click", () => { show(name); models(); });
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = all[1 - all.indexOf(name)];
      show(other);
      models();
      $(`tab-${other}`).focus();
    });
  }
}

settings.start(look);
chat.start(look);
segment.start();
tabs();
$("model").addEventListener("change", () => {
  picked[$("segment").hidden ? "chat" : "segment"] = $("model").value;
  models();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
