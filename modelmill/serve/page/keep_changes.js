// Keeps changes of a conversation, and tells the user when they cannot be kept.
import { trouble } from "./dom.js";
import { chat } from "./chat_state.js";
import * as library from "./library.js";

/** @typedef {import("./conversation.js").OpenConversation} OpenConversation */
/** @typedef {import("./tree.js").Message} Message */

/** Write messages that have changed to the store. @param {OpenConversation} conversation @param {...Message} messages */
export async function keepChanges(conversation, ...messages) {
  try {
    await conversation.save(...messages);
    if (chat.conversation === conversation) conversation.remember();
    chat.unwritten = false;
  } catch (error) {
    if (!chat.unwritten) trouble(`${error.name === "QuotaExceededError" ? "The browser's storage is full" : "The browser's storage does not work"}: `
      + "this conversation is lost with the tab. Export it, or delete others.");
    chat.unwritten = true;
  }
  await library.showCurrent(chat.conversation.info.id);
}
