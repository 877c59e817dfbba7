// What the user does with a message: edit, regenerate, continue, answer its calls, pick a version.
import { $, say, trouble } from "./dom.js";
import { editIn } from "./articles.js";
import { ask, fieldsOf } from "./ask.js";
import { canAsk, chat } from "./chat_state.js";
import { keepChanges } from "./keep_changes.js";
import { hasFormat } from "./request_settings.js";
import { articles, draw } from "./thread.js";

/** @typedef {import("./tree.js").Message} Message */

/** Show the branch with a message. @param {string} id */
export function select(id) {
  if (chat.running) return;
  const { conversation } = chat;
  conversation.tree.select(id);
  draw();
  keepChanges(conversation);
  const article = articles()[conversation.tree.path().findIndex((message) => message.id === id)];
  /** @type {any} */ (article?.querySelector(".branches button:not(:disabled)"))?.focus();
  const siblings = conversation.tree.siblings(id);
  say(`Version ${siblings.findIndex((message) => message.id === id) + 1} of ${siblings.length}`);
}

/** @param {Message} message */
export async function regenerate(message) {
  if (!canAsk()) return;
  const fields = fieldsOf(false);
  if (!fields) return;
  const { conversation } = chat;
  if (message.bad && !message.content && !conversation.tree.children(message.id).length) await conversation.remove(message);
  conversation.tree.leaf = message.parent;
  ask(fields);
}

/** Regenerate the last answer. */
export function again() {
  const last = chat.conversation.tree.path().at(-1);
  if (last?.role === "assistant") regenerate(last);
}

/** Go on with an answer that was cut. @param {Message} message */
export function proceed(message) {
  if (!canAsk()) return;
  if (hasFormat()) { trouble("An answer in a set format cannot be continued: raise Max tokens and regenerate it."); return; }
  const fields = fieldsOf(true);
  if (fields) ask(fields, message);
}

/** @param {Message} message of the assistant @param {string[]} results one for each call */
export function answerCalls(message, results) {
  if (!canAsk()) return;
  const fields = fieldsOf(false);
  if (!fields) return;
  const { conversation } = chat;
  keepChanges(conversation, ...message.calls.map(({ id, name }, i) =>
    conversation.add({ role: "tool", content: results[i], callId: id, toolName: name })));
  ask(fields);
}

/** @param {Message} message */
export function edit(message) {
  if (chat.running) return;
  const at = chat.conversation.tree.path().indexOf(message);
  const cancel = () => { draw(); /** @type {any} */ (articles()[at].querySelector(".foot button")).focus(); };
  editIn(articles()[at], message.content, (content) => {
    if (!(content || message.files || message.pictures) || !chat.model?.ready) return;
    const fields = fieldsOf(false);
    if (!fields) return;
    const { role, pictures, files, callId, toolName } = message;
    const given = { role, content, pictures, files, callId, toolName };
    keepChanges(chat.conversation, chat.conversation.add(JSON.parse(JSON.stringify(given)), message.parent));
    $("message").focus();
    ask(fields);
  }, cancel);
}

/** Edit the user's last message. @returns {boolean} whether there is one */
export function editLast() {
  const last = chat.conversation.tree.path().findLast((message) => message.role === "user");
  if (last) edit(last);
  return Boolean(last);
}
