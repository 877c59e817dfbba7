// A conversation: input, streaming, stop, edit, regenerate, continue, results of tools.
import { $, h, say, sayMore, trouble } from "./dom.js";
import { Answer } from "./answer.js";
import { AnswerArticle, articleOf, editIn } from "./articles.js";
import { call, events, Refused } from "./api.js";
import * as attachments from "./attachments.js";
import { showContext } from "./context_meter.js";
import { OpenConversation, watchOtherTabs } from "./conversation.js";
import * as library from "./library.js";
import { Painter } from "./painter.js";
import { showSystemPrompt, systemPrompt } from "./presets.js";
import { bodyOf } from "./request.js";
import { hasFormat, requestSettings, SettingError } from "./request_settings.js";
import { sampling, suggest, unsaid } from "./sampling.js";
import { openSettings } from "./settings.js";
import { keep, kept } from "./storage.js";
import { resultForm } from "./tool_cards.js";
import { wholeCalls } from "./tree.js";

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
let unwritten = false; // whether the last change could not be stored, and the user knows
let stale = false; // whether another tab has changed the conversation while an answer was written here
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
  keep("draft", field.value);
  refresh();
}

// -- rendering

/** The tab's title. */
function showTitle() { document.title = talk.info.title ? `${talk.info.title} · modelmill` : "modelmill"; }

const actions = { edit, regenerate, proceed, select };

function draw() {
  const path = talk.tree.path();
  const articles = path.map((message, i) => articleOf(message, talk.tree.siblings(message.id), i === path.length - 1, actions));
  for (const old of document.querySelectorAll("#talk article, #talk .tool-results")) {
    if (!articles.includes(/** @type {HTMLElement} */ (old))) old.remove();
  }
  $("welcome").hidden = path.length > 0;
  articles.reduce((before, article) => {
    if (before.nextElementSibling !== article) before.after(article); // what is in its place keeps focus and selection
    return article;
  }, $("welcome"));
  const last = path.at(-1);
  const calls = last?.role === "assistant" ? wholeCalls(last) : [];
  if (calls.length) $("talk").append(resultForm(calls, (results) => answerCalls(last, results)));
  showTitle();
  showContext(path, model?.length);
  refresh();
}

/** Write messages that have changed to the store. @param {OpenConversation} conversation @param {...Message} messages */
async function write(conversation, ...messages) {
  try {
    await conversation.save(...messages);
    if (talk === conversation) talk.remember();
    unwritten = false;
  } catch (error) {
    if (!unwritten) trouble(`${error.name === "QuotaExceededError" ? "The browser's storage is full" : "The browser's storage does not work"}: `
      + "this conversation is lost with the tab. Export it, or delete others.");
    unwritten = true;
  }
  await library.showCurrent(talk.info.id);
}

function select(id) {
  if (running) return;
  talk.tree.select(id);
  draw();
  write(talk);
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
  article.begin();
  document.querySelector("#talk article:last-of-type").replaceWith(article.element);
  say("Answering");
  const keepIt = () => write(conversation, message);
  await stream(body, article, keepIt);
  running = null;
  const near = isNear();
  const focused = document.activeElement;
  article.end();
  draw();
  if (near) follow();
  const selects = !getSelection()?.isCollapsed;
  if (focused === $("stop") || (focused === document.body && !selects)) $("message").focus();
  await keepIt();
  if (stale) await reload();
}

/** Show the answer as it comes. @param {() => void} keepIt keeps it now and then: the tab may be closed */
async function stream(body, article, keepIt) {
  const message = article.message;
  const answer = new Answer(message);
  const painter = new Painter(() => {
    const near = isNear();
    article.waiting.remove();
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
  write(talk, talk.add({ role: "user", content, ...attachments.take() }));
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
  write(talk, ...message.calls.map(({ id, name }, i) => talk.add({ role: "tool", content: results[i], callId: id, toolName: name })));
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
    write(talk, talk.add(JSON.parse(JSON.stringify(given)), message.parent));
    $("message").focus();
    ask(fields);
  }, cancel);
}

// -- which conversation

function showTalk(next) {
  running?.abort();
  talk = next;
  unwritten = stale = false;
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

/** Whether the user writes in the conversation: an edit, or a tool's result. */
const isEditing = () => [...document.querySelectorAll("#talk textarea")].some((field) => field.matches("article *") || /** @type {any} */ (field).value);

/** Show what another tab has written to this conversation. */
async function reload() {
  const { id } = talk.info;
  const found = await OpenConversation.load(id);
  if (!found || talk.info.id !== id) return;
  stale = Boolean(running) || isEditing();
  if (stale) return;
  const near = isNear();
  const top = $("talk").scrollTop;
  talk = found;
  if (!$("settings").open) showSystemPrompt(found.info.system);
  draw();
  $("talk").scrollTop = near ? $("talk").scrollHeight : top;
}

/** Another tab has changed or deleted a conversation. @param {import("./conversation.js").Change} change */
function changedElsewhere({ id, deleted }) {
  if (!talk.stored || (id !== talk.info.id && !(id === null && deleted))) return;
  if (!deleted) { reload(); return; }
  removed(id);
  trouble("This conversation was deleted in another tab.");
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

function renamed(id, title) {
  if (id !== talk.info.id) return;
  talk.info.title = title;
  showTitle();
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
  library.start({ open, fresh, removed, renamed });
  watchOtherTabs(changedElsewhere);
  const last = await OpenConversation.last();
  talk = last ?? OpenConversation.fresh(systemPrompt());
  if (last) showSystemPrompt(last.info.system);
  restored = true;
  field.value = kept("draft") ?? "";
  grow();
  draw();
  follow();
  await library.showCurrent(talk.info.id);
}
