// Which buttons of the chat work now.
import { $ } from "./dom.js";
import * as attachments from "./attachments.js";
import { chat } from "./chat_state.js";

export function refreshButtons() {
  const { running, model, restored } = chat;
  $("send").disabled = !restored || !model?.ready || !($("message").value.trim() || attachments.any());
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  const buttons = (selector) => /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll(selector));
  for (const button of buttons("#talk [data-asks]")) button.disabled = Boolean(running) || !model?.ready;
  for (const button of buttons("#talk [data-arrow]")) button.disabled = Boolean(running) || button.dataset.end === "true";
}
