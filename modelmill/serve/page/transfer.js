// Conversations as files: JSON holds everything and can be imported again, Markdown is the branch that is shown.
import { fenced } from "./request.js";
import { Tree } from "./tree.js";
import { newId } from "./without_https.js";

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {import("./tree.js").Message} Message */
/** @typedef {{conversation: Conversation, messages: Message[]}} Whole */

const FORMAT = "modelmill-conversations";
const VERSION = 1;
const MAX_TIME = 8.64e15; // milliseconds: of a Date
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
const time = (value) => (Number.isFinite(value) && Math.abs(value) <= MAX_TIME ? value : Date.now());
const isObject = (value) => value !== null && typeof value === "object";
const list = (value, each) => (Array.isArray(value) ? value.filter(each) : []);

/** Parents by id; one that leads back to its own message is left out. */
function parentsOf(messages) {
  const parents = new Map(messages.map(({ id, parent }) => [id, parent]));
  for (const { id } of messages) {
    const seen = new Set([id]);
    let at = parents.get(id);
    while (parents.has(at) && !seen.has(at)) { seen.add(at); at = parents.get(at); }
    if (seen.has(at)) parents.set(id, null);
  }
  return parents;
}

/** Only what the page knows, each of its type: a file may come from anywhere. */
function checkedMessage(given, ids, parents, conversation) {
  const pictures = list(given.pictures, (url) => typeof url === "string" && url.startsWith("data:image/"));
  const files = list(given.files, isObject).map((file) => ({ name: text(file.name), text: text(file.text) }));
  const calls = list(given.calls, isObject).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) }));
  return {
    id: ids.get(given.id), conversation, parent: ids.get(parents.get(given.id)) ?? null, role: given.role,
    content: text(given.content), created: time(given.created),
    ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}), ...(calls.length ? { calls } : {}),
    ...(given.reasoning ? { reasoning: text(given.reasoning) } : {}),
    ...(Number.isFinite(given.thinkingMs) ? { thinkingMs: given.thinkingMs } : {}),
    ...(Number.isFinite(given.contextTokens) ? { contextTokens: given.contextTokens } : {}),
    ...Object.fromEntries(["callId", "toolName", "figures", "finish", "model", "note"]
      .filter((key) => typeof given[key] === "string").map((key) => [key, given[key]])),
    ...(given.bad === true ? { bad: true } : {}),
  };
}

const isMessage = (given) => ROLES.has(given?.role) && typeof given.id === "string";

function checkedConversation(given) {
  const { conversation, messages } = given ?? {};
  if (typeof conversation?.title !== "string" || !Array.isArray(messages) || !messages.length || !messages.every(isMessage)) {
    throw new Error("A conversation of this file is not complete.");
  }
  const id = newId(); // a new one: what is here is never overwritten
  const ids = new Map(messages.map((message) => [message.id, newId()]));
  const parents = parentsOf(messages);
  return {
    conversation: { id, title: conversation.title, system: text(conversation.system), created: time(conversation.created),
      updated: time(conversation.updated), leaf: ids.get(conversation.leaf) ?? null },
    messages: messages.map((message) => checkedMessage(message, ids, parents, id)),
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
