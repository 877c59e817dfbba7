// Conversations in the browser's IndexedDB: one record for each conversation and each message. Nothing leaves the browser.

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {import("./tree.js").Message} Message */

const NAME = "modelmill";
const VERSION = 1;
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
    database.onversionchange = () => database.close(); // another tab has a newer page
  }

  #stores(mode) {
    const transaction = this.database.transaction(["conversations", "messages"], mode);
    return { transaction, conversations: transaction.objectStore("conversations"), messages: transaction.objectStore("messages") };
  }

  /** @returns {Promise<Conversation[]>} newest first */
  async list() {
    const all = await done(this.#stores("readonly").conversations.getAll());
    return all.sort((a, b) => b.updated - a.updated);
  }

  /** @param {string} id of a conversation @returns {Promise<Message[]>} oldest first */
  async messages(id) {
    const all = await done(this.#stores("readonly").messages.index("conversation").getAll(id));
    return all.sort((a, b) => a.created - b.created);
  }

  /** @param {Conversation} conversation @param {Message[]} messages that are new or have changed */
  async put(conversation, messages = []) {
    const stores = this.#stores("readwrite");
    stores.conversations.put(conversation);
    for (const message of messages) stores.messages.put(message);
    await committed(stores.transaction);
  }

  /** @param {string} id of a message */
  async removeMessage(id) {
    const { messages, transaction } = this.#stores("readwrite");
    messages.delete(id);
    await committed(transaction);
  }

  /** @param {string} id of a conversation */
  async remove(id) {
    const { conversations, messages, transaction } = this.#stores("readwrite");
    conversations.delete(id);
    for (const key of await done(messages.index("conversation").getAllKeys(id))) messages.delete(key);
    await committed(transaction);
  }

  async clear() {
    const { conversations, messages, transaction } = this.#stores("readwrite");
    conversations.clear();
    messages.clear();
    await committed(transaction);
  }

  /** One message at a time, since pictures may be large. @param {(message: Message) => void} visit */
  eachMessage(visit) {
    const request = this.#stores("readonly").messages.openCursor();
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        if (!request.result) { resolve(undefined); return; }
        visit(request.result.value);
        request.result.continue();
      };
    });
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

/** @typedef {{conversation: Conversation, excerpt: string}} Hit */

/** Text around the first place of a word. */
function excerptOf(text, word) {
  const at = text.toLowerCase().indexOf(word);
  if (at < 0) return null;
  const from = Math.max(0, at - 30);
  const until = at + word.length + 50;
  return `${from ? "… " : ""}${text.slice(from, until).replace(/\s+/g, " ")}${until < text.length ? " …" : ""}`;
}

/**
 * Conversations whose title or messages contain a text, in any case.
 * @param {string} words
 * @returns {Promise<Hit[]>} newest first
 */
export async function search(words) {
  const word = words.trim().toLowerCase();
  const kept = await store();
  const all = await kept.list();
  if (!word) return all.map((conversation) => ({ conversation, excerpt: "" }));
  const excerpts = new Map();
  await kept.eachMessage((message) => {
    if (excerpts.has(message.conversation)) return;
    const texts = [message.content, ...(message.files ?? []).map((file) => file.text)];
    const excerpt = texts.map((text) => excerptOf(text, word)).find((each) => each !== null);
    if (excerpt) excerpts.set(message.conversation, excerpt);
  });
  return all.filter(({ id, title }) => excerpts.has(id) || title.toLowerCase().includes(word))
    .map((conversation) => ({ conversation, excerpt: excerpts.get(conversation.id) ?? "" }));
}
