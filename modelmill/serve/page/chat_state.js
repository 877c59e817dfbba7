// What the chat of this tab shows and does now; its other modules read and change it here.
import { OpenConversation } from "./conversation.js";

/** @typedef {{id: string, ready: boolean, talks: boolean, pictures: boolean, suggested: any, length: number|null}} ChatModel */

export const chat = {
  conversation: OpenConversation.fresh(""),
  /** @type {ChatModel|null} the model that answers */
  model: null,
  /** @type {AbortController|null} of the running request */
  running: null,
  restored: false, // whether the conversation that this tab showed before is shown again
  unwritten: false, // whether the last change could not be stored, and the user knows
  stale: false, // whether another tab has changed the conversation while an answer was written here
};

/** Whether a request may be sent now. */
export const canAsk = () => !chat.running && Boolean(chat.model?.ready);
