// A conversation as a tree: editing a message or regenerating an answer makes a branch beside the earlier one.

const ENDS = new Set(["stop", "tool_calls", "content_filter"]); // finish reasons

/**
 * @typedef {object} ToolCall
 * @property {string} id
 * @property {string} name
 * @property {string} arguments JSON, as far as it has been written
 */

/**
 * @typedef {object} TextFile
 * @property {string} name
 * @property {string} text
 */

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversation id of the conversation
 * @property {string|null} parent id of the message before; null: the first one
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {number} created milliseconds since 1970, different for each message of a conversation
 * @property {string[]} [pictures] data: URLs
 * @property {TextFile[]} [files]
 * @property {string} [reasoning] the thinking before the answer
 * @property {number} [thinkingMs] its time
 * @property {ToolCall[]} [calls]
 * @property {string} [callId] of a tool's result: the call
 * @property {string} [toolName]
 * @property {string} [figures] speed, in words
 * @property {number} [contextTokens] tokens of prompt and answer
 * @property {string|null} [finish] why the answer ended
 * @property {string} [model]
 * @property {string} [note] shown below the answer
 * @property {boolean} [bad] whether the note is an error
 */

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {string} system prompt
 * @property {number} created
 * @property {number} updated
 * @property {string|null} leaf last message of the branch that is shown
 */

/** Whether an answer has been written to its end; not one that was cut, stopped, or broke off. @param {Message} message */
export const isWhole = ({ finish, bad }) => !bad && ENDS.has(finish ?? "");

/** Calls of tools that can be answered: not those of an answer that broke off. @param {Message} message @returns {ToolCall[]} */
export const wholeCalls = (message) => (isWhole(message) ? message.calls ?? [] : []);

export class Tree {
  /**
   * @param {Message[]} messages in any order
   * @param {string|null} leaf last message of the branch that is shown
   */
  constructor(messages = [], leaf = null) {
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.leaf = this.messages.has(leaf ?? "") ? leaf : this.#newest(null);
  }

  /** @param {string|null} parent @returns {Message[]} oldest first */
  children(parent) {
    return [...this.messages.values()].filter((each) => each.parent === parent).sort((a, b) => a.created - b.created);
  }

  /** @param {string} id @returns {Message[]} the message and its alternatives, oldest first */
  siblings(id) { return this.children(this.messages.get(id)?.parent ?? null); }

  /** The messages of the branch that is shown. @returns {Message[]} */
  path() { return this.#upwards(this.leaf).reverse(); }

  /** A message and those before it, last first. A parent that leads back to its own message ends them. */
  #upwards(id) {
    const found = new Set();
    for (let at = this.messages.get(id ?? ""); at && !found.has(at); at = this.messages.get(at.parent ?? "")) found.add(at);
    return [...found];
  }

  /** Add a message and show it. @param {Message} message */
  add(message) {
    const last = Math.max(0, ...[...this.messages.values()].map((each) => each.created));
    message.created = Math.max(message.created, last + 1);
    this.messages.set(message.id, message);
    this.leaf = message.id;
  }

  /** Remove a message without answers; the one before becomes the last. @param {string} id */
  remove(id) {
    const parent = this.messages.get(id)?.parent ?? null;
    this.messages.delete(id);
    if (this.leaf === id) this.leaf = parent;
  }

  /** Show the branch with this message that was written to last. @param {string} id */
  select(id) { this.leaf = this.#newest(id); }

  /** The newest message below this one, itself included. */
  #newest(from) {
    const below = (id) => from === null || this.#upwards(id).some((message) => message.id === from);
    const newestFirst = [...this.messages.values()].sort((a, b) => b.created - a.created);
    return newestFirst.find((message) => below(message.id))?.id ?? from;
  }
}
