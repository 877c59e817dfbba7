// The field in which a message is written: its draft, its keys, sending.
import { $, h, trouble } from "./dom.js";
import { ask, fieldsOf } from "./ask.js";
import * as attachments from "./attachments.js";
import { refreshButtons } from "./chat_buttons.js";
import { canAsk, chat } from "./chat_state.js";
import { keepChanges } from "./keep_changes.js";
import { editLast } from "./message_actions.js";
import { systemPrompt } from "./presets.js";
import { keep, kept } from "./storage.js";

const IDEAS = ["Explain how a watermill works", "Write a haiku about rain", "Name three uses of a paper clip"];

/** Show a text in the field. @param {string} text */
function fill(text) {
  $("message").value = text;
  grow();
}

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  keep("draft", field.value);
  refreshButtons();
}

/** Show the text that was being written when the tab was closed. */
export const restoreDraft = () => fill(kept("draft") ?? "");

/** Show what can be written to the model. @param {import("./chat_state.js").ChatModel|null} model */
export function writeTo(model) {
  const silent = Boolean(model && !model.talks);
  $("message").placeholder = silent ? "This model has no chat template: ask it at /v1/completions"
    : model?.ready === false ? "The model is not ready" : "Write a message";
  $("message").disabled = silent;
  attachments.allowPictures(Boolean(model?.pictures));
}

function send() {
  const content = $("message").value.trim();
  if (!chat.restored || !canAsk() || !(content || attachments.any())) return;
  trouble("");
  const fields = fieldsOf(false);
  if (!fields) return;
  const { conversation } = chat;
  conversation.info.system = systemPrompt();
  keepChanges(conversation, conversation.add({ role: "user", content, ...attachments.take() }));
  fill("");
  ask(fields);
}

function startKeys(field) {
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !field.value && !chat.running && editLast()) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.running?.abort();
  });
}

export function start() {
  $("ideas").append(...IDEAS.map((idea) => h("button", { type: "button", onclick: () => {
    fill(idea);
    $("message").focus();
  } }, idea)));
  startKeys($("message"));
  attachments.start(refreshButtons);
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", () => chat.running?.abort());
}
