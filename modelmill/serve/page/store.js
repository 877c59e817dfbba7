// Conversations in the browser's IndexedDB: one record for each conversation and each message. Nothing leaves the browser.

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {import("./tree.js").Message} Message */

const NAME = "modelmill";
const VERSION = 1;
const BATCH = 100; // messages that are read at once
const MAX_OPEN_MS = 5000; // a database that another page blocks would hold up everything

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** @param {IDBTransaction} transaction @returns {Promise<void>} */
const committed = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = transaction.onerror = () => reject(transaction.error);
});

/** Two lists in one; of the same id, the second's. @template {{id: string}} T @param {T[]} old @param {T[]} changed @returns {T[]} */
const newer = (old, changed) => [...new Map([...old, ...changed].map((each) => [each.id, each])).values()];

/** @returns {Promise<IDBDatabase>} */
async function openDatabase() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  return done(request);
}

/** The same without a database: until the tab is closed. */
class MemoryStore {
  constructor() {
    this.lasting = false;
    this.known = new Map();
    this.said = new Map();
  }

  /** Ids of conversations that are not in the database, as far as there is one. */
  get unwritten() { return new Set(); }

  async list() { return [...this.known.values()].sort((a, b) => b.updated - a.updated); }
  async messages(id) { return [...this.said.values()].filter((message) => message.conversation === id); }
  async put(conversation, messages = []) {
    this.known.set(conversation.id, structuredClone(conversation));
    for (const message of messages) this.said.set(message.id, structuredClone(message));
  }
  async removeMessage(id) { this.said.delete(id); }
  async remove(id) {
    this.known.delete(id);
    for (const message of await this.messages(id)) this.said.delete(message.id);
  }
  async clear() { this.known.clear(); this.said.clear(); }
  async eachMessage(visit) { for (const message of this.said.values()) visit(message); }
}

class DatabaseStore {
  /** @param {IDBDatabase} database */
  constructor(database) {
    this.lasting = true;
    this.database = database;
    this.pending = new MemoryStore(); // what the database did not take, since it is full: it can still be exported
    database.onversionchange = () => database.close(); // another tab has a newer page
  }

  #stores(mode) {
    const transaction = this.database.transaction(["conversations", "messages"], mode);
    return { transaction, conversations: transaction.objectStore("conversations"), messages: transaction.objectStore("messages") };
  }

  get unwritten() { return new Set(this.pending.known.keys()); }

  /** @returns {Promise<Conversation[]>} newest first */
  async list() {
    const written = await done(this.#stores("readonly").conversations.getAll());
    return newer(written, await this.pending.list()).sort((a, b) => b.updated - a.updated);
  }

  /** @param {string} id of a conversation @returns {Promise<Message[]>} oldest first */
  async messages(id) {
    const written = await done(this.#stores("readonly").messages.index("conversation").getAll(id));
    return newer(written, await this.pending.messages(id)).sort((a, b) => a.created - b.created);
  }

  /**
   * Write a conversation. What the database does not take is kept until the tab is closed, and written with the next change.
   * @param {Conversation} conversation
   * @param {Message[]} messages that are new or have changed
   * @throws {DOMException} of the database
   */
  async put(conversation, messages = []) {
    const all = newer(await this.pending.messages(conversation.id), messages);
    try {
      const stores = this.#stores("readwrite");
      stores.conversations.put(conversation);
      for (const message of all) stores.messages.put(message);
      await committed(stores.transaction);
    } catch (error) {
      await this.pending.put(conversation, messages);
      throw error;
    }
    await this.pending.remove(conversation.id);
  }

  /** @param {string} id of a message */
  async removeMessage(id) {
    await this.pending.removeMessage(id);
    const { messages, transaction } = this.#stores("readwrite");
    messages.delete(id);
    await committed(transaction);
  }

  /** @param {string} id of a conversation */
  async remove(id) {
    await this.pending.remove(id);
    const { conversations, messages, transaction } = this.#stores("readwrite");
    conversations.delete(id);
    for (const key of await done(messages.index("conversation").getAllKeys(id))) messages.delete(key);
    await committed(transaction);
  }

  async clear() {
    await this.pending.clear();
    const { conversations, messages, transaction } = this.#stores("readwrite");
    conversations.clear();
    messages.clear();
    await committed(transaction);
  }

  /** A few messages at a time, since pictures may be large. @param {(message: Message) => void} visit */
  async eachMessage(visit) {
    for (let batch, last = null; (batch = await this.#after(last)).length; last = batch.at(-1).id) batch.forEach(visit);
    await this.pending.eachMessage(visit);
  }

  #after(id) {
    return done(this.#stores("readonly").messages.getAll(id === null ? null : IDBKeyRange.lowerBound(id, true), BATCH));
  }
}

async function open() {
  const late = new Promise((_, reject) => { setTimeout(reject, MAX_OPEN_MS); });
  try {
    return new DatabaseStore(await Promise.race([openDatabase(), late]));
  } catch { return new MemoryStore(); } // disabled, or blocked
}

let opened = null;

/**
 * The store; `lasting` says whether it outlives the tab.
 * @returns {Promise<DatabaseStore|MemoryStore>}
 */
export function store() {
  opened ??= open();
  return opened;
}
