// The conversation that is shown: its tree of messages, kept in the store with every change.
import { keep, kept } from "./storage.js";
import { store } from "./store.js";
import { Tree } from "./tree.js";
import { newId } from "./without_https.js";

/** @typedef {import("./tree.js").Conversation} Info */
/** @typedef {import("./tree.js").Message} Message */

const MAX_TITLE = 60; // characters

/** The first line of a message. @param {Message} message */
function titleOf({ content, files, pictures }) {
  const line = content.trim().split("\n")[0] || files?.[0]?.name || (pictures ? "Picture" : "Conversation");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}

const channel = new BroadcastChannel("modelmill");

export class OpenConversation {
  /**
   * @param {Info} info
   * @param {Message[]} messages
   * @param {boolean} stored
   */
  constructor(info, messages = [], stored = false) {
    this.info = info;
    this.tree = new Tree(messages, info.leaf);
    this.stored = stored; // a conversation without messages is not kept
    this.deleted = false; // an answer that ends later does not bring it back
  }

  /** @param {string} system prompt @returns {OpenConversation} */
  static fresh(system) {
    const now = Date.now();
    return new OpenConversation({ id: newId(), title: "", system, created: now, updated: now, leaf: null });
  }

  /** @param {string} id @returns {Promise<OpenConversation|null>} null: it has been deleted */
  static async load(id) {
    const shelf = await store();
    const info = (await shelf.list()).find((each) => each.id === id);
    if (!info) return null;
    return new OpenConversation(info, await shelf.messages(id), true);
  }

  /** The one that this tab showed before it was loaded again. @returns {Promise<OpenConversation|null>} */
  static async last() {
    const id = kept("open");
    return id ? OpenConversation.load(id) : null;
  }

  /**
   * Add a message to the branch that is shown.
   * @param {Partial<Message> & {role: Message["role"], content: string}} given
   * @param {string|null} parent
   * @returns {Message}
   */
  add(given, parent = this.tree.leaf) {
    const message = { id: newId(), conversation: this.info.id, parent, created: Date.now(), ...given };
    this.tree.add(message);
    if (!this.info.title && given.role === "user") this.info.title = titleOf(message);
    return message;
  }

  /** This tab shows it again after it is loaded anew. */
  remember() { keep("open", this.stored ? this.info.id : null); }

  /** Keep the conversation and messages that have changed. @param {...Message} messages */
  async save(...messages) {
    if (this.deleted || !this.tree.messages.size) return;
    this.info.leaf = this.tree.leaf;
    if (messages.length) this.info.updated = Date.now();
    await (await store()).put(this.info, messages);
    this.stored = true;
    tellOtherTabs({ id: this.info.id });
  }

  /** Remove an answer that has failed. @param {Message} message */
  async remove(message) {
    this.tree.remove(message.id);
    await (await store()).removeMessage(message.id);
  }
}

/** @typedef {{id: string|null, deleted?: boolean}} Change of a conversation; null: of several, all of them if deleted */

/** Calls back when another tab has changed a conversation. @param {(change: Change) => void} changed */
export function watchOtherTabs(changed) { channel.addEventListener("message", ({ data }) => changed(data)); }

/** Tell other tabs what has changed. @param {Change} change */
export function tellOtherTabs(change) { channel.postMessage(change); }
