// Collects the events of a stream in a message.
import { Pace } from "./pace.js";

/** @typedef {import("./tree.js").Message} Message */

export class Answer {
  /**
   * @param {Message} message which is extended
   * @param {() => number} now a clock in milliseconds
   */
  constructor(message, now = () => performance.now()) {
    this.message = message;
    this.now = now;
    this.pace = new Pace(now);
    this.thinkingSince = null;
  }

  get thinking() { return this.thinkingSince !== null; }

  /**
   * @param {any} event of a chat completion's stream
   * @returns {boolean} whether the message has changed
   */
  add(event) {
    if (event.usage) this.message.contextTokens = event.usage.total_tokens;
    const choice = event.choices?.[0];
    if (!choice) return false;
    const { content, tool_calls: calls } = choice.delta ?? {};
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
    const tokens = choice.token_ids?.length ?? (content || reasoning || calls ? 1 : 0);
    if (tokens) this.pace.more(tokens);
    if (reasoning) this.#think(reasoning);
    if (content || calls) this.#endThinking();
    if (content) this.message.content += content;
    for (const call of calls ?? []) this.#call(call);
    if (choice.finish_reason) this.message.finish = choice.finish_reason;
    return Boolean(content || reasoning || calls);
  }

  /** The stream has ended, or was stopped. */
  end() {
    this.#endThinking();
    this.message.figures = this.pace.told();
  }

  #think(text) {
    this.thinkingSince ??= this.now();
    this.message.reasoning = (this.message.reasoning ?? "") + text;
  }

  #endThinking() {
    if (this.thinkingSince === null) return;
    this.message.thinkingMs = (this.message.thinkingMs ?? 0) + this.now() - this.thinkingSince;
    this.thinkingSince = null;
  }

  #call({ index, id, function: called }) {
    this.message.calls ??= [];
    const call = (this.message.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (called?.name) call.name = called.name;
    call.arguments += called?.arguments ?? "";
  }
}
