// Which conversation is shown: a new one, one of the list, or what another tab has made of it.
import { $, trouble } from "./dom.js";
import { chat } from "./chat_state.js";
import { OpenConversation } from "./conversation.js";
import * as library from "./library.js";
import { showSystemPrompt, systemPrompt } from "./presets.js";
import { draw, follow, isNear, showTitle } from "./thread.js";

/** @param {OpenConversation} conversation */
function show(conversation) {
  chat.running?.abort();
  chat.conversation = conversation;
  chat.unwritten = chat.stale = false;
  conversation.remember();
  trouble("");
  draw();
  follow();
  library.showCurrent(conversation.info.id);
  $("message").focus();
}

/** Begin a new conversation; the present one stays in the list. */
export const fresh = () => show(OpenConversation.fresh(systemPrompt()));

/** Show a conversation of the list. @param {string} id */
export async function open(id) {
  const found = await OpenConversation.load(id);
  if (!found) { library.refresh(); return; }
  showSystemPrompt(found.info.system);
  show(found);
}

/** Show the conversation again that this tab showed before it was loaded anew, or a new one. */
export async function restore() {
  const last = await OpenConversation.last();
  chat.conversation = last ?? OpenConversation.fresh(systemPrompt());
  if (last) showSystemPrompt(last.info.system);
  chat.restored = true;
}

/** Whether the user writes in the conversation: an edit, or a tool's result. */
const isEditing = () => [...document.querySelectorAll("#talk textarea")].some((field) => field.matches("article *") || /** @type {any} */ (field).value);

/** Show what another tab has written to this conversation. */
export async function reload() {
  const { id } = chat.conversation.info;
  const found = await OpenConversation.load(id);
  if (!found || chat.conversation.info.id !== id) return;
  chat.stale = Boolean(chat.running) || isEditing();
  if (chat.stale) return;
  const near = isNear();
  const top = $("talk").scrollTop;
  chat.conversation = found;
  if (!$("settings").open) showSystemPrompt(found.info.system);
  draw();
  $("talk").scrollTop = near ? $("talk").scrollHeight : top;
}

/** Another tab has changed or deleted a conversation. @param {import("./conversation.js").Change} change */
export function changedElsewhere({ id, deleted }) {
  const { stored, info } = chat.conversation;
  if (!stored || (id !== info.id && !(id === null && deleted))) return;
  if (!deleted) { reload(); return; }
  removed(id);
  trouble("This conversation was deleted in another tab.");
}

/** @param {string|null} id of the conversation that was deleted; null: all */
export function removed(id) {
  if (id !== null && id !== chat.conversation.info.id) return;
  chat.conversation.deleted = true;
  fresh();
}

/** @param {string} id of a conversation of the list @param {string} title its new one */
export function renamed(id, title) {
  if (id !== chat.conversation.info.id) return;
  chat.conversation.info.title = title;
  showTitle();
}

/** The user has changed the system prompt: it belongs to this conversation from now on. */
export function prompted() {
  chat.conversation.info.system = systemPrompt();
  if (chat.conversation.stored) chat.conversation.save();
}
