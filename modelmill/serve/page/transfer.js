// Conversations as files: JSON holds everything and can be imported again, Markdown is the branch that is shown.
import { fenced } from "./request.js";
import { Tree } from "./tree.js";

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {import("./tree.js").Message} Message */
/** @typedef {{conversation: Conversation, messages: Message[]}} Whole */

const FORMAT = "modelmill-conversations";
const VERSION = 1;
const ROLES = new Set(["user", "assistant", "tool"]);

/**
 * @param {Whole[]} all
 * @returns {string}
 */
export const toJson = (all) => `${JSON.stringify({ format: FORMAT, version: VERSION, conversations: all }, null, 1)}\n`;

function messageToMarkdown(message) {
  if (message.role === "tool") return `## Result of ${message.toolName ?? "a tool"}\n\n${fenced(message.content)}`;
  const parts = [message.role === "user" ? "## You" : `## ${message.model ?? "Answer"}`];
  if (message.reasoning) parts.push(message.reasoning.trim().split("\n").map((line) => `> ${line}`).join("\n"));
  for (const file of message.files ?? []) parts.push(`${file.name}:\n\n${fenced(file.text)}`);
  if (message.pictures?.length) parts.push(`(${message.pictures.length} picture${message.pictures.length > 1 ? "s" : ""})`);
  if (message.content) parts.push(message.content.trim());
  for (const call of message.calls ?? []) parts.push(`Call of ${call.name}:\n\n${fenced(call.arguments, "json")}`);
  return parts.join("\n\n");
}

/**
 * @param {Whole} whole
 * @returns {string}
 */
export function toMarkdown({ conversation, messages }) {
  const system = conversation.system ? [`## System prompt\n\n${conversation.system}`] : [];
  const path = new Tree(messages, conversation.leaf).path();
  return `${[`# ${conversation.title}`, ...system, ...path.map(messageToMarkdown)].join("\n\n")}\n`;
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : Date.now());

/** Only what the page knows, each of its type: a file may come from anywhere. */
function checkedMessage(given, ids, conversation) {
  const pictures = (given.pictures ?? []).filter((url) => typeof url === "string" && url.startsWith("data:image/"));
  const files = (given.files ?? []).map((file) => ({ name: text(file.name), text: text(file.text) }));
  const calls = (given.calls ?? []).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) }));
  return {
    id: ids.get(given.id), conversation, parent: ids.get(given.parent) ?? null, role: given.role,
    content: text(given.content), created: number(given.created),
    ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}), ...(calls.length ? { calls } : {}),
    ...(given.reasoning ? { reasoning: text(given.reasoning) } : {}),
    ...(Number.isFinite(given.thinkingMs) ? { thinkingMs: given.thinkingMs } : {}),
    ...(Number.isFinite(given.contextTokens) ? { contextTokens: given.contextTokens } : {}),
    ...Object.fromEntries(["callId", "toolName", "figures", "finish", "model", "note"]
      .filter((key) => typeof given[key] === "string").map((key) => [key, given[key]])),
    ...(given.bad === true ? { bad: true } : {}),
  };
}

function checkedConversation({ conversation, messages }) {
  if (typeof conversation?.title !== "string" || !Array.isArray(messages) || !messages.every((each) => ROLES.has(each?.role))) {
    throw new Error("A conversation of this file is not complete.");
  }
  const id = crypto.randomUUID(); // a new one: what is here is never overwritten
  const ids = new Map(messages.map((message) => [message.id, crypto.randomUUID()]));
  return {
    conversation: { id, title: conversation.title, system: text(conversation.system), created: number(conversation.created),
      updated: number(conversation.updated), leaf: ids.get(conversation.leaf) ?? null },
    messages: messages.map((message) => checkedMessage(message, ids, id)),
  };
}

/**
 * Read an exported file.
 * @param {string} json
 * @returns {Whole[]} under new ids
 * @throws {Error} in one line: what is wrong with the file
 */
export function fromJson(json) {
  let given;
  try { given = JSON.parse(json); } catch { throw new Error("This file is not JSON. Choose a file that this page has exported."); }
  if (given?.format !== FORMAT || !Array.isArray(given.conversations)) {
    throw new Error("This file has no conversations of this page.");
  }
  if (given.version !== VERSION) throw new Error(`This file has version ${given.version}; this page reads version ${VERSION}.`);
  return given.conversations.map(checkedConversation);
}
