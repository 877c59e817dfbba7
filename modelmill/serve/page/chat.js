// The chat: joins the thread, the field for messages, the requests and the list of conversations.
import { $ } from "./dom.js";
import * as answers from "./ask.js";
import { refreshButtons } from "./chat_buttons.js";
import { chat } from "./chat_state.js";
import * as composer from "./composer.js";
import { showContext } from "./context_meter.js";
import { watchOtherTabs } from "./conversation.js";
import * as library from "./library.js";
import * as actions from "./message_actions.js";
import { suggest } from "./sampling.js";
import { changedElsewhere, fresh, open, removed, renamed, restore } from "./shown_conversation.js";
import * as thread from "./thread.js";

/** The model that answers. @param {import("./chat_state.js").ChatModel|null} found */
export function use(found) {
  chat.model = found;
  suggest(found?.suggested);
  $("welcome-model").textContent = found ? `Model: ${found.id}` : "";
  composer.writeTo(found);
  showContext(chat.conversation.tree.path(), found?.length);
  refreshButtons();
}

/** @param {() => void} lookAtServer is called when a request has failed */
export async function start(lookAtServer) {
  answers.start(lookAtServer);
  thread.start(actions, actions.answerCalls);
  composer.start();
  $("fresh").addEventListener("click", fresh);
  library.start({ open, fresh, removed, renamed });
  watchOtherTabs(changedElsewhere);
  await restore();
  composer.restoreDraft();
  thread.draw();
  thread.follow();
  await library.showCurrent(chat.conversation.info.id);
}
