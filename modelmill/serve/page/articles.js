// Messages as articles.
import { act, copied, h, icon } from "./dom.js";
import { cards } from "./tool_cards.js";
import { separate, ThinkingView } from "./thinking.js";
import { isWhole } from "./tree.js";
import { copyText } from "./without_https.js";

/** @typedef {import("./tree.js").Message} Message */

/**
 * @typedef {object} Actions what a message's buttons do
 * @property {(message: Message) => void} edit
 * @property {(message: Message) => void} regenerate
 * @property {(message: Message) => void} proceed with an answer that was cut
 * @property {(id: string) => void} select the branch with this message
 */

/** Arrows between the versions of a message. */
function branches(message, siblings, actions) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const arrow = (name, label, to) => h("button", { type: "button", class: "icon", "aria-label": label, disabled: !siblings[to],
    "data-arrow": name, "data-end": String(!siblings[to]), onclick: () => actions.select(siblings[to].id) }, icon(name));
  return h("span", { class: "branches", role: "group", "aria-label": "Versions" },
    arrow("left", "Previous version", at - 1), h("span", {}, `${at + 1} / ${siblings.length}`), arrow("right", "Next version", at + 1));
}

function userArticle(message, siblings, actions) {
  const pictures = (message.pictures || []).map((src, i) => h("img", { src, alt: `Picture ${i + 1}` }));
  const files = (message.files || []).map(({ name, text }) =>
    h("details", { class: "file" }, h("summary", {}, icon("file"), name), h("pre", { tabindex: "0" }, text)));
  return h("article", { class: "user", "aria-label": "You" },
    pictures.length ? h("div", { class: "pictures" }, ...pictures) : null, ...files,
    message.content ? h("div", { class: "said" }, message.content) : null,
    h("div", { class: "foot" }, act("Edit", "Edit this message", () => actions.edit(message), true), branches(message, siblings, actions)));
}

function toolArticle(message, siblings, actions) {
  return h("article", { class: "tool", "aria-label": `Result of ${message.toolName}` },
    h("p", {}, "Result of ", h("strong", {}, message.toolName ?? "a tool")), h("pre", { class: "said", tabindex: "0" }, message.content),
    h("div", { class: "foot" }, act("Edit", "Edit this result", () => actions.edit(message), true), branches(message, siblings, actions)));
}

const canContinue = (message) => Boolean(message.content || message.reasoning) && !message.calls?.length && !isWhole(message);
/** What is said below an answer; it has no finish if its tab was closed. @param {Message} message */
const noteOf = ({ note, finish }) => note ?? (finish ? "" : "This answer has not been finished.");

function foot(message, siblings, last, actions) {
  const { text } = separate(message);
  return h("div", { class: "foot" },
    text || !message.calls?.length ? act("Copy", "Copy this answer", async (event) => {
      const button = event.currentTarget;
      copied(button, await copyText(text));
    }) : null,
    act("Regenerate", "Regenerate this answer", () => actions.regenerate(message), true),
    last && canContinue(message) ? act("Continue", "Continue this answer", () => actions.proceed(message), true) : null,
    branches(message, siblings, actions),
    message.figures ? h("span", { class: "figures" }, message.figures) : null);
}

/** @type {WeakMap<Message, AnswerArticle>} what is drawn stays: a conversation may be long */
const drawn = new WeakMap();

/** The article of an answer, which may still be written. */
export class AnswerArticle {
  /**
   * @param {Message} message
   * @param {(text: string) => void} finished is called with each finished block
   */
  constructor(message, finished = () => {}) {
    this.message = message;
    this.text = h("div", { class: "said" });
    this.calls = h("div", { class: "calls" });
    this.element = h("article", { class: "assistant", "aria-label": "Answer" }, this.text, this.calls);
    this.view = new ThinkingView(this.text, finished);
    this.busy = false;
    drawn.set(message, this);
  }

  /** The answer is being written. */
  begin() {
    this.busy = true;
    this.element.setAttribute("aria-busy", "true");
    this.waiting = h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
    this.show(true);
    this.element.append(this.waiting);
  }

  /** It is written. */
  end() {
    this.busy = false;
    this.element.removeAttribute("aria-busy");
    this.waiting?.remove();
    this.show();
  }

  /** @param {boolean} grows @param {boolean} thinks */
  show(grows = false, thinks = false) {
    this.view.show(this.message, grows, thinks);
    if (this.message.calls?.length) this.calls.replaceChildren(...cards(this.message.calls, grows));
  }

  /** The buttons and the note of an answer that is complete. */
  complete(siblings, last, actions) {
    const note = noteOf(this.message);
    this.element.querySelectorAll(":scope > .foot, :scope > .note").forEach((old) => old.remove());
    this.element.append(foot(this.message, siblings, last, actions));
    if (note) this.element.append(h("p", { class: this.message.bad ? "note bad" : "note" }, note));
    return this.element;
  }
}

/**
 * The article of a message.
 * @param {Message} message
 * @param {Message[]} siblings the message and its alternatives
 * @param {boolean} last of the conversation
 * @param {Actions} actions
 * @returns {HTMLElement}
 */
export function articleOf(message, siblings, last, actions) {
  if (message.role === "user") return userArticle(message, siblings, actions);
  if (message.role === "tool") return toolArticle(message, siblings, actions);
  const known = drawn.get(message);
  const article = known ?? new AnswerArticle(message);
  if (!known) article.show();
  return article.busy ? article.element : article.complete(siblings, last, actions);
}

/**
 * Replace a message by a field in which it is edited.
 * @param {HTMLElement} article
 * @param {string} text
 * @param {(text: string) => void} send
 * @param {() => void} cancel
 */
export function editIn(article, text, send, cancel) {
  const field = h("textarea", { rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edit the message" });
  field.value = text;
  const done = () => send(field.value.trim());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
  });
  article.replaceChildren(field, h("div", { class: "foot" }, act("Cancel", "Cancel the edit", cancel), act("Send", "Send the edited message", done)));
  field.focus();
}
