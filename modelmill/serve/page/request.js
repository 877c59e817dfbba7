// The request of a conversation, from its messages and the settings.

import { wholeCalls } from "./tree.js";

/** @typedef {import("./tree.js").Message} Message */

/**
 * Text in a fence of Markdown that is longer than any inside.
 * @param {string} text
 * @param {string} info behind the fence
 * @returns {string}
 */
export function fenced(text, info = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${info}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** The words of a message, with its text files before them. */
function words({ content, files }) {
  const parts = (files ?? []).map(({ name, text }) => `${name}\n${fenced(text)}`);
  return [...parts, ...(content ? [content] : [])].join("\n\n");
}

function toApi(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "assistant") {
    const calls = wholeCalls(message);
    return {
      role: "assistant", content: message.content,
      ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
      ...(calls.length ? { tool_calls: calls.map(({ id, name, arguments: given }) =>
        ({ id, type: "function", function: { name, arguments: given } })) } : {}),
    };
  }
  if (!message.pictures?.length) return { role: "user", content: words(message) };
  const parts = message.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text: words(message) }] };
}

/** Answers that failed or were stopped before their first token are no turns. @param {Message} message */
const isTurn = (message) => message.role !== "assistant" || Boolean(message.content || wholeCalls(message).length);

/**
 * Messages as the API takes them.
 * @param {Message[]} path
 * @param {string} system prompt; empty: none
 * @param {boolean} continues whether the last message is the beginning of the answer: perhaps of its thinking alone
 * @returns {object[]}
 */
export function messagesOf(path, system, continues = false) {
  const told = path.filter((message, at) => isTurn(message) || (continues && at === path.length - 1)).map(toApi);
  return system.trim() ? [{ role: "system", content: system.trim() }, ...told] : told;
}

/**
 * Body of a chat completion.
 * @param {string} model
 * @param {Message[]} path
 * @param {string} system
 * @param {object} fields of the settings
 * @param {boolean} continues whether the last message is the beginning of the answer
 * @returns {object}
 */
export function bodyOf(model, path, system, fields, continues = false) {
  return {
    model, messages: messagesOf(path, system, continues), stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    ...fields, ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}
