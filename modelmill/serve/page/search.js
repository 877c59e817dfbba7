// Finds conversations by words.
import { store } from "./store.js";

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {import("./tree.js").Message} Message */
/** @typedef {{conversation: Conversation, excerpt: string}} Hit */

/**
 * The words of a search, in lower case.
 * @param {string} given
 * @returns {string[]}
 */
export const wordsOf = (given) => given.toLowerCase().split(/\s+/).filter(Boolean);

/** Text around the first place of a word. */
function excerptOf(text, word) {
  const at = text.toLowerCase().indexOf(word);
  const from = Math.max(0, at - 30);
  const until = at + word.length + 50;
  return `${from ? "… " : ""}${text.slice(from, until).replace(/\s+/g, " ")}${until < text.length ? " …" : ""}`;
}

/** Which words a conversation has, and an excerpt with one of them. */
class Found {
  constructor(title, words) {
    this.missing = new Set(words.filter((word) => !title.toLowerCase().includes(word)));
    this.words = words;
    this.excerpt = "";
    this.says = false; // whether the excerpt has a word that the title has not
  }

  /** @param {string} text */
  add(text) {
    const low = text.toLowerCase();
    const here = this.words.filter((word) => low.includes(word));
    const further = here.find((word) => this.missing.has(word));
    if (here.length && (!this.excerpt || (further && !this.says))) {
      this.excerpt = excerptOf(text, further ?? here[0]);
      this.says = Boolean(further);
    }
    for (const word of here) this.missing.delete(word);
  }
}

/**
 * Conversations whose title and messages contain all words, in any case.
 * @param {string} given
 * @returns {Promise<Hit[]>} newest first
 */
export async function search(given) {
  const words = wordsOf(given);
  const kept = await store();
  const all = await kept.list();
  if (!words.length) return all.map((conversation) => ({ conversation, excerpt: "" }));
  const found = new Map(all.map(({ id, title }) => [id, new Found(title, words)]));
  await kept.eachMessage(/** @param {Message} message */ (message) => {
    for (const text of [message.content, ...(message.files ?? []).map((file) => file.text)]) found.get(message.conversation)?.add(text);
  });
  return all.filter(({ id }) => !found.get(id)?.missing.size)
    .map((conversation) => ({ conversation, excerpt: found.get(conversation.id)?.excerpt ?? "" }));
}
