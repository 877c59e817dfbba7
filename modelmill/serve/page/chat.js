// A conversation: input, streaming, stop, edit, regenerate, continue, results of tools.
import { $, h, say, sayMore, trouble } from "./dom.js";
import { Answer } from "./answer.js";
import { AnswerArticle, articleOf, editIn } from "./articles.js";
import { call, events, Refused } from "./api.js";
import * as attachments from "./attachments.js";
import { showContext } from "./context_meter.js";
import { OpenConversation } from "./conversation.js";
import * as library from "./library.js";
import { Painter } from "./painter.js";
import { showSystemPrompt, systemPrompt } from "./presets.js";
import { bodyOf } from "./request.js";
import { hasFormat, requestSettings, SettingError } from "./request_settings.js";
import { sampling, suggest, unsaid } from "./sampling.js";
import { openSettings } from "./settings.js";
import { resultForm } from "./tool_cards.js";

/** @typedef {import("./tree.js").Message} Message */

const IDEAS = ["Explain how a watermill works", "Write a haiku about rain", "Name three uses of a paper clip"];
const SAVE_EVERY_MS = 2000;
const NEAR = 60; // pixels from the end, within which the view follows the answer

let talk = OpenConversation.fresh("");
/** @type {AbortController|null} of the running request */
let running = null;
/** @type {{id: string, ready: boolean, talks: boolean, pictures: boolean, suggested: any, length: number|null}|null} */
let model = null;
let restored = false; // whether the conversation that this tab showed before is shown again
let asked = () => {}; // called when a request fails: looks at the server's state

const isNear = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < NEAR;
const follow = () => { $("talk").scrollTop = $("talk").scrollHeight; };

/** The model that answers. @param {typeof model} found */
export function use(found) {
  model = found;
  suggest(found?.suggested);
  $("welcome-model").textContent = found ? `Model: ${found.id}` : "";
  const silent = Boolean(found && !found.talks);
  $("message").placeholder = silent ? "This model has no chat template: ask it at /v1/completions"
    : found?.ready === false ? "The model is not ready" : "Write a message";
  $("message").disabled = silent;
  attachments.allowPictures(Boolean(found?.pictures));
  showContext(talk.tree.path(), model?.length);
  refresh();
}

function refresh() {
  $("send").disabled = !restored || !model?.ready || !($("message").value.trim() || attachments.any());
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  const buttons = (selector) => /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll(selector));
  for (const button of buttons("#talk [data-asks]")) button.disabled = Boolean(running) || !model?.ready;
  for (const button of buttons("#talk [data-arrow]")) button.disabled = Boolean(running) || button.dataset.end === "true";
}

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  refresh();
}

// -- rendering

const actions = { edit, regenerate, proceed, select };

function draw() {
  const path = talk.tree.path();
  for (const old of document.querySelectorAll("#talk article, #talk .tool-results")) old.remove();
  $("welcome").hidden = path.length > 0;
  path.forEach((message, i) => $("talk").append(articleOf(message, talk.tree.siblings(message.id), i === path.length - 1, actions)));
  const last = path.at(-1);
  if (last?.role === "assistant" && last.calls?.length && !last.bad) $("talk").append(resultForm(last.calls, (results) => answerCalls(last, results)));
  showContext(path, model?.length);
  refresh();
}

/** Keep messages that have changed. @param {OpenConversation} conversation @param {...Message} messages */
async function kept(conversation, ...messages) {
  try {
    await conversation.save(...messages);
    if (talk === conversation) talk.remember();
  } catch (error) {
    trouble(error.name === "QuotaExceededError" ? "The browser's storage is full: this conversation is not kept. Delete others."
      : "The browser did not keep this conversation. Export it before you close the page.");
  }
  await library.showCurrent(talk.info.id);
}

function select(id) {
  if (running) return;
  talk.tree.select(id);
  draw();
  kept(talk);
  const article = [...document.querySelectorAll("#talk article")][talk.tree.path().findIndex((message) => message.id === id)];
  /** @type {any} */ (article?.querySelector(".branches button:not(:disabled)"))?.focus();
  const siblings = talk.tree.siblings(id);
  say(`Version ${siblings.findIndex((message) => message.id === id) + 1} of ${siblings.length}`);
}

// -- requests

/** The settings as fields; null after a message that says what is wrong with them. */
function fieldsOf(continues) {
  try {
    return { ...unsaid(), ...sampling(), ...requestSettings(continues) };
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    trouble(error.message);
    openSettings(error.field);
    return null;
  }
}

/** Ask for an answer to the branch that is shown, or for the rest of its last message. */
async function ask(fields, continued = null) {
  const conversation = talk; // another one may be opened before the answer ends
  const body = bodyOf(model.id, talk.tree.path(), talk.info.system, fields, Boolean(continued));
  const message = continued ?? talk.add({ role: "assistant", content: "", model: model.id });
  for (const name of ["note", "bad", "finish"]) delete message[name];
  running = new AbortController();
  draw();
  follow();
  const article = new AnswerArticle(message, sayMore);
  article.show(true);
  article.element.setAttribute("aria-busy", "true");
  const waiting = h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
  article.element.append(waiting);
  document.querySelector("#talk article:last-of-type").replaceWith(article.element);
  say("Answering");
  const keepIt = () => kept(conversation, message);
  await stream(body, article, waiting, keepIt);
  running = null;
  const near = isNear();
  const focused = document.activeElement;
  const unfolded = article.view.details?.open;
  draw();
  const details = document.querySelector("#talk article:last-of-type details.thinking");
  if (details && unfolded) /** @type {HTMLDetailsElement} */ (details).open = true;
  if (near) follow();
  if (focused === $("stop") || focused === document.body) $("message").focus();
  await keepIt();
}

/** Show the answer as it comes. @param {() => void} keepIt keeps it now and then: the tab may be closed */
async function stream(body, article, waiting, keepIt) {
  const message = article.message;
  const answer = new Answer(message);
  const painter = new Painter(() => {
    const near = isNear();
    waiting.remove();
    article.show(true, answer.thinking);
    $("pace").textContent = answer.pace.told();
    $("keyhint").hidden = true;
    if (near) follow();
  });
  let saved = performance.now();
  const leave = () => { if (document.hidden) keepIt(); };
  document.addEventListener("visibilitychange", leave);
  keepIt();
  try {
    const response = await call("/v1/chat/completions", body, running.signal);
    for await (const event of events(response)) {
      if (answer.add(event)) painter.request();
      if (performance.now() - saved > SAVE_EVERY_MS) { saved = performance.now(); keepIt(); }
    }
    if (message.finish === "length") message.note = cutNote(message);
    painter.paint();
    sayMore(article.view.answer.rest);
    if (message.calls?.length) sayMore(`Calls ${message.calls.map(({ name }) => name).join(", ")}`);
  } catch (error) {
    failed(message, error);
  }
  document.removeEventListener("visibilitychange", leave);
  painter.cancel();
  answer.end();
  $("pace").textContent = "";
  $("keyhint").hidden = false;
}

function cutNote({ content }) {
  return content ? "The answer was cut: it reached the maximum of tokens. Continue goes on where it ended."
    : "The answer was cut before it began: raise Max tokens in the settings and regenerate it.";
}

function failed(message, error) {
  if (error.name === "AbortError") {
    message.note = "Stopped.";
    message.finish = "stopped";
    say("Stopped");
    return;
  }
  message.note = error.message;
  message.bad = true;
  say(error.message);
  if (error instanceof Refused && error.status === 401) openSettings("key");
  asked();
}

function send() {
  const content = $("message").value.trim();
  if (running || !restored || !model?.ready || !(content || attachments.any())) return;
  trouble("");
  const fields = fieldsOf(false);
  if (!fields) return;
  talk.info.system = systemPrompt();
  kept(talk, talk.add({ role: "user", content, ...attachments.take() }));
  $("message").value = "";
  grow();
  ask(fields);
}

async function regenerate(message) {
  if (running || !model?.ready) return;
  const fields = fieldsOf(false);
  if (!fields) return;
  if (message.bad && !message.content && !talk.tree.children(message.id).length) await talk.remove(message);
  talk.tree.leaf = message.parent;
  ask(fields);
}

function proceed(message) {
  if (running || !model?.ready) return;
  if (hasFormat()) { trouble("An answer in a set format cannot be continued: raise Max tokens and regenerate it."); return; }
  const fields = fieldsOf(true);
  if (fields) ask(fields, message);
}

/** @param {Message} message of the assistant @param {string[]} results one for each call */
function answerCalls(message, results) {
  if (running || !model?.ready) return;
  const fields = fieldsOf(false);
  if (!fields) return;
  kept(talk, ...message.calls.map(({ id, name }, i) => talk.add({ role: "tool", content: results[i], callId: id, toolName: name })));
  ask(fields);
}

function edit(message) {
  if (running) return;
  const at = talk.tree.path().indexOf(message);
  const article = /** @type {HTMLElement} */ (document.querySelectorAll("#talk article")[at]);
  const cancel = () => { draw(); /** @type {any} */ (document.querySelectorAll("#talk article")[at].querySelector(".foot button")).focus(); };
  editIn(article, message.content, (content) => {
    if (!(content || message.files || message.pictures) || !model?.ready) return;
    const fields = fieldsOf(false);
    if (!fields) return;
    const { role, pictures, files, callId, toolName } = message;
    const given = { role, content, pictures, files, callId, toolName };
    kept(talk, talk.add(JSON.parse(JSON.stringify(given)), message.parent));
    $("message").focus();
    ask(fields);
  }, cancel);
}

// -- which conversation

function showTalk(next) {
  running?.abort();
  talk = next;
  talk.remember();
  trouble("");
  draw();
  follow();
  library.showCurrent(talk.info.id);
  $("message").focus();
}

/** Begin a new conversation; the present one stays in the list. */
export const fresh = () => showTalk(OpenConversation.fresh(systemPrompt()));

/** Show a conversation of the list. @param {string} id */
export async function open(id) {
  const found = await OpenConversation.load(id);
  if (!found) { library.refresh(); return; }
  showSystemPrompt(found.info.system);
  showTalk(found);
}

/** Regenerate the last answer. */
export function again() {
  const last = talk.tree.path().at(-1);
  if (last?.role === "assistant") regenerate(last);
}

/** The user has changed the system prompt: it belongs to this conversation from now on. */
export function prompted() {
  talk.info.system = systemPrompt();
  if (talk.stored) talk.save();
}

/** @param {string|null} id of the conversation that was deleted; null: all */
function removed(id) {
  if (id !== null && id !== talk.info.id) return;
  talk.deleted = true;
  fresh();
}

function startKeys(field) {
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !field.value && !running) {
      const last = talk.tree.path().findLast((message) => message.role === "user");
      if (last) { event.preventDefault(); edit(last); }
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
}

/** @param {() => void} unwell is called when a request has failed */
export async function start(unwell) {
  asked = unwell;
  const field = $("message");
  $("ideas").append(...IDEAS.map((idea) => h("button", { type: "button", onclick: () => {
    field.value = idea;
    grow();
    field.focus();
  } }, idea)));
  startKeys(field);
  attachments.start(refresh);
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", () => running?.abort());
  $("fresh").addEventListener("click", fresh);
  library.start({ open, fresh, removed, renamed: (id, title) => { if (id === talk.info.id) talk.info.title = title; } });
  const last = await OpenConversation.last();
  talk = last ?? OpenConversation.fresh(systemPrompt());
  if (last) showSystemPrompt(last.info.system);
  restored = true;
  draw();
  follow();
  await library.showCurrent(talk.info.id);
}
