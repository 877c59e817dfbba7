// The page: which model each tab uses, the tabs, and the keys.
import { $ } from "./dom.js";
import * as chat from "./chat.js";
import * as help from "./help.js";
import * as library from "./library.js";
import { again } from "./message_actions.js";
import * as models from "./models.js";
import * as segment from "./segment.js";
import * as settings from "./settings.js";
import { fresh, prompted } from "./shown_conversation.js";

const TABS = ["chat", "segment"];
const picked = { chat: "", segment: "" }; // selected model of each tab

const segments = (card) => card.engine_type === "segmentation";
const tab = () => ($("segment").hidden ? "chat" : "segment");
const named = (list, id) => list.find((card) => card.id === id) ?? list[0];

/** Models of a tab; those that chat come first. */
function listOf(name) {
  if (name === "segment") return models.cards.filter(segments);
  return models.cards.filter((card) => !segments(card)).sort((a, b) => Number(a.chat === false) - Number(b.chat === false));
}

const chosen = () => named(listOf(tab()), picked[tab()]) ?? null;

/** Hand the chosen models to the tabs. */
function update() {
  const [writers, viewers] = TABS.map(listOf);
  $("tabs").hidden = !(viewers.length && writers.length);
  if (viewers.length && !writers.length) show("segment");
  const writer = named(writers, picked.chat);
  const viewer = named(viewers, picked.segment);
  models.fill(listOf(tab()), chosen()?.id);
  chat.use(writer ? {
    id: writer.id, ready: models.ready(writer) && writer.chat !== false, talks: writer.chat !== false,
    pictures: Boolean(writer.input_modalities?.includes("image")), suggested: writer.suggested_sampling, length: writer.max_model_len,
  } : null);
  segment.use(viewer ? { id: viewer.id, ready: models.ready(viewer) } : null);
}

function show(name) {
  for (const each of TABS) {
    const on = each === name;
    $(each).hidden = !on;
    $(`tab-${each}`).setAttribute("aria-selected", String(on));
    $(`tab-${each}`).tabIndex = on ? 0 : -1;
  }
  document.body.classList.toggle("segments", name === "segment");
  $("fresh").hidden = $("toggle-library").hidden = name !== "chat";
  /** @type {HTMLAnchorElement} */ (document.querySelector(".skip")).href = name === "chat" ? "#message" : "#choose";
}

function startTabs() {
  const change = (name) => { show(name); update(); };
  for (const name of TABS) {
    $(`tab-${name}`).addEventListener("click", () => change(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = TABS[1 - TABS.indexOf(name)];
      change(other);
      $(`tab-${other}`).focus();
    });
  }
}

settings.start(models.look, prompted);
models.start(update, chosen);
segment.start();
startTabs();
help.start([
  { keys: "Enter", text: "Send the message" },
  { keys: "Shift Enter", text: "Break the line" },
  { keys: "Esc", text: "Stop the answer; close a dialog or the list" },
  { keys: "↑", text: "In an empty field: edit the last message" },
  { keys: "Alt N", text: "New conversation", code: "KeyN", run: fresh },
  { keys: "Alt K", text: "Search conversations", code: "KeyK", run: library.focusSearch },
  { keys: "Alt B", text: "Show or hide the conversations", code: "KeyB", run: library.toggle },
  { keys: "Alt M", text: "To the message field", code: "KeyM", run: () => $("message").focus() },
  { keys: "Alt R", text: "Regenerate the last answer", code: "KeyR", run: again },
  { keys: "Alt ,", text: "Settings", code: "Comma", run: () => settings.openSettings() },
  { keys: "Alt /", text: "This help", code: "Slash", run: () => $("help").showModal() },
]);
$("model").addEventListener("change", () => {
  picked[tab()] = $("model").value;
  models.look();
});
models.look();
chat.start(models.look);
