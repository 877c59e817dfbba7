// A request for an answer, and the answer as it is streamed.
import { $, say, sayMore, trouble } from "./dom.js";
import { Answer } from "./answer.js";
import { AnswerArticle } from "./articles.js";
import { call, events, Refused } from "./api.js";
import { chat } from "./chat_state.js";
import { keepChanges } from "./keep_changes.js";
import { Painter } from "./painter.js";
import { bodyOf } from "./request.js";
import { requestSettings, SettingError } from "./request_settings.js";
import { sampling, unsaid } from "./sampling.js";
import { openSettings } from "./settings.js";
import { reload } from "./shown_conversation.js";
import { draw, follow, isNear } from "./thread.js";

/** @typedef {import("./tree.js").Message} Message */

const SAVE_EVERY_MS = 2000;

let lookAtServer = () => {}; // called when a request fails

/** The settings as fields; null after a message that says what is wrong with them. @param {boolean} continues an answer */
export function fieldsOf(continues) {
  try {
    return { ...unsaid(), ...sampling(), ...requestSettings(continues) };
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    trouble(error.message);
    openSettings(error.field);
    return null;
  }
}

/**
 * Ask for an answer to the branch that is shown, or for the rest of its last message.
 * @param {object} fields of the request
 * @param {Message|null} continued
 */
export async function ask(fields, continued = null) {
  const { conversation, model } = chat; // another one may be opened before the answer ends
  const body = bodyOf(model.id, conversation.tree.path(), conversation.info.system, fields, Boolean(continued));
  const message = continued ?? conversation.add({ role: "assistant", content: "", model: model.id });
  for (const name of ["note", "bad", "finish"]) delete message[name];
  chat.running = new AbortController();
  draw();
  follow();
  const article = new AnswerArticle(message, sayMore);
  article.begin();
  document.querySelector("#talk article:last-of-type").replaceWith(article.element);
  say("Answering");
  const keepIt = () => keepChanges(conversation, message);
  await stream(body, article, keepIt);
  chat.running = null;
  const near = isNear();
  const focused = document.activeElement;
  article.end();
  draw();
  if (near) follow();
  const selects = !getSelection()?.isCollapsed;
  if (focused === $("stop") || (focused === document.body && !selects)) $("message").focus();
  await keepIt();
  if (chat.stale) await reload();
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
    const response = await call("/v1/chat/completions", body, chat.running.signal);
    for await (const event of events(response)) {
      if (answer.add(event)) painter.request();
      if (performance.now() - saved > SAVE_EVERY_MS) { saved = performance.now(); keepIt(); }
    }
    if (message.finish === "length") message.note = cutNote(message);
    painter.paint();
    sayMore(article.view.answer.rest);
    if (message.calls?.length) sayMore(`Calls ${message.calls.map(({ name }) => name).join(", ")}`);
  } catch (error) {
    fail(message, error);
  }
  document.removeEventListener("visibilitychange", leave);
  painter.cancel();
  answer.end();
  $("pace").textContent = "";
  $("keyhint").hidden = false;
}

function cutNote({ content, reasoning }) {
  return content || reasoning ? "The answer was cut: it reached the maximum of tokens. Continue goes on where it ended."
    : "The answer was cut before it began: raise Max tokens in the settings and regenerate it.";
}

function fail(message, error) {
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
  lookAtServer();
}

/** @param {() => void} look at the server's state: called when a request has failed */
export function start(look) { lookAtServer = look; }
