// The branch of messages that is shown.
import { $ } from "./dom.js";
import { articleOf } from "./articles.js";
import { refreshButtons } from "./chat_buttons.js";
import { chat } from "./chat_state.js";
import { showContext } from "./context_meter.js";
import { resultForm } from "./tool_cards.js";
import { wholeCalls } from "./tree.js";

/** @typedef {import("./tree.js").Message} Message */

const NEAR = 60; // pixels from the end, within which the view follows the answer

/** @type {import("./articles.js").Actions} */
let actions;
/** @type {(message: Message, results: string[]) => void} */
let answerCalls;

/** Whether the end of the thread is in view. */
export const isNear = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < NEAR;
/** Show the end of the thread. */
export const follow = () => { $("talk").scrollTop = $("talk").scrollHeight; };

/** The articles of the messages, in their order. @returns {HTMLElement[]} */
export const articles = () => [...document.querySelectorAll("#talk article")].map((each) => /** @type {HTMLElement} */ (each));

/** The tab's title. */
export function showTitle() {
  const { title } = chat.conversation.info;
  document.title = title ? `${title} · modelmill` : "modelmill";
}

/** Show the branch as it is now. */
export function draw() {
  const { tree } = chat.conversation;
  const path = tree.path();
  const present = path.map((message, i) => articleOf(message, tree.siblings(message.id), i === path.length - 1, actions));
  for (const old of document.querySelectorAll("#talk article, #talk .tool-results")) {
    if (!present.includes(/** @type {HTMLElement} */ (old))) old.remove();
  }
  $("welcome").hidden = path.length > 0;
  present.reduce((before, article) => {
    if (before.nextElementSibling !== article) before.after(article); // what is in its place keeps focus and selection
    return article;
  }, $("welcome"));
  const last = path.at(-1);
  const calls = last?.role === "assistant" ? wholeCalls(last) : [];
  if (calls.length) $("talk").append(resultForm(calls, (results) => answerCalls(last, results)));
  showTitle();
  showContext(path, chat.model?.length);
  refreshButtons();
}

/**
 * Say what the buttons of messages do.
 * @param {import("./articles.js").Actions} given
 * @param {(message: Message, results: string[]) => void} giveResults of a message's calls
 */
export function start(given, giveResults) {
  actions = given;
  answerCalls = giveResults;
}
