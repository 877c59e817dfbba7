// The thinking before an answer, folded: from reasoning_content, or between <think> tags where the server does not know them.
import { h } from "./dom.js";
import { View } from "./markdown.js";

const TAGGED = /^\s*<think>([\s\S]*?)(?:<\/think>([\s\S]*)|$)/;

/**
 * Thinking and answer of a message.
 * @param {{content: string, reasoning?: string}} message
 * @returns {{thought: string, text: string}}
 */
export function separate({ content, reasoning }) {
  const tagged = reasoning ? null : TAGGED.exec(content);
  return tagged ? { thought: tagged[1], text: tagged[2] ?? "" } : { thought: reasoning ?? "", text: content };
}

const seconds = (ms) => (ms < 10000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`);

/** Thinking and answer as elements that follow a growing message. */
export class ThinkingView {
  /**
   * @param {HTMLElement} root
   * @param {(text: string) => void} finished is called with each finished block of the answer
   */
  constructor(root, finished = () => {}) {
    this.root = root;
    this.details = null;
    this.answer = new View(root.appendChild(h("div", { class: "answer" })), finished);
  }

  /**
   * @param {{content: string, reasoning?: string, thinkingMs?: number}} message
   * @param {boolean} grows whether more will follow
   * @param {boolean} thinks whether the thinking has not ended
   */
  show(message, grows = false, thinks = false) {
    const { thought, text } = separate(message);
    if (thought) this.#think(thought, message.thinkingMs, grows, thinks);
    this.answer.show(text, grows);
  }

  #think(thought, ms, grows, thinks) {
    if (!this.details) {
      this.summary = h("summary");
      this.inner = h("div");
      this.details = h("details", { class: "thinking" }, this.summary, this.inner);
      this.thought = new View(this.inner);
      this.root.prepend(this.details);
      this.details.addEventListener("toggle", () => this.#draw());
    }
    const words = thinks ? "Thinking …" : ms ? `Thought for ${seconds(ms)}` : "Thoughts";
    if (this.summary.textContent !== words) this.summary.textContent = words;
    this.state = { thought, grows };
    this.#draw();
  }

  /** Folded thinking is not drawn. */
  #draw() {
    if (this.details.open) this.thought.show(this.state.thought, this.state.grows);
  }
}
