// A conversation: input, streaming, stop, edit, regenerate.
import { $, copied, h, say, trouble } from "./dom.js";
import { call, events, Refused } from "./api.js";
import { View } from "./markdown.js";
import { keep, kept, openSettings, sampling, suggest, unsaid } from "./settings.js";
import { Pace } from "./pace.js";
import { prepared } from "./picture.js";

const IDEAS = ["Explain how a watermill works", "Write a haiku about rain", "Name three uses of a paper clip"];
const MOST_PICTURES = 8;

let talk = []; // {role, content, pictures?, figures?, note?, bad?}
let running = null; // AbortController of the running request
let pictures = []; // data: URLs of the next message
let model = null; // {id, ready, talks, pictures, suggested}: ready only if it can chat
let asked = () => {}; // called when a request fails: checks /health

const bottom = () => $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight;
const follow = () => { $("talk").scrollTop = $("talk").scrollHeight; };

export function use(found) {
  model = found;
  suggest(found?.suggested);
  $("welcome-model").textContent = found ? `${found.id} answers` : "";
  const silent = found && !found.talks;
  $("message").placeholder = silent ? "This model has no chat template: ask it at /v1/completions"
    : found?.ready === false ? "The model is loading" : "Write a message";
  $("message").disabled = silent;
  $("add-picture").hidden = !found?.pictures;
  if (!found?.pictures) { pictures = []; showPictures(); }
  refresh();
}

function refresh() {
  $("send").disabled = !model?.ready || !($("message").value.trim() || pictures.length);
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  for (const button of document.querySelectorAll("article .foot button[data-asks]")) button.disabled = Boolean(running) || !model?.ready;
}

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  refresh();
}

// -- rendering

function act(name, label, run, asks) {
  return h("button", { type: "button", "aria-label": label, onclick: run, "data-asks": asks || false }, name);
}

function userArticle(index) {
  const said = talk[index];
  const shown = (said.pictures || []).map((src, i) => h("img", { src, alt: `Picture ${i + 1}` }));
  return h("article", { class: "user", "aria-label": "You" },
    shown.length ? h("div", { class: "pictures" }, ...shown) : null,
    h("div", { class: "said" }, said.content),
    h("div", { class: "foot" }, act("Edit", "Edit this message", () => edit(index), true)));
}

function assistantArticle(index) {
  const said = talk[index];
  const text = h("div", { class: "said" });
  const made = h("article", { class: "assistant", "aria-label": "Answer" }, text);
  made.view = new Thoughts(text);
  made.view.show(said.content);
  made.append(foot(index));
  if (said.note) made.append(h("p", { class: said.bad ? "note bad" : "note" }, said.note));
  return made;
}

function foot(index) {
  const said = talk[index];
  return h("div", { class: "foot" },
    act("Copy", "Copy this answer", async (event) => {
      const button = event.currentTarget;
      await navigator.clipboard?.writeText(said.content);
      copied(button);
    }),
    act("Regenerate", "Regenerate this answer", () => again(index), true),
    said.figures ? h("span", { class: "figures" }, said.figures) : null);
}

// The reasoning before an answer is collapsed.
class Thoughts {
  constructor(root) {
    this.root = root;
    this.thought = null;
    this.answer = new View(root.appendChild(h("div", { class: "answer" })));
  }

  show(text) {
    const found = /^\s*<think>([\s\S]*?)(?:<\/think>([\s\S]*)|$)/.exec(text);
    if (found && !this.thought) {
      const inner = h("div");
      this.root.prepend(h("details", {}, h("summary", {}, "Thoughts"), inner));
      this.thought = new View(inner);
    }
    if (found) this.thought.show(found[1]);
    this.answer.show(found ? found[2] || "" : text);
  }
}

function draw() {
  for (const old of document.querySelectorAll("#talk article")) old.remove();
  $("welcome").hidden = talk.length > 0;
  talk.forEach((said, i) => $("talk").append(said.role === "user" ? userArticle(i) : assistantArticle(i)));
  remember();
  refresh();
}

function remember() {
  // if the pictures exceed the storage, save the text only
  if (!keep("talk", talk)) keep("talk", talk.map((said) => ({ ...said, pictures: undefined })));
}

// -- requests

function messages() {
  const system = (kept("system") || "").trim();
  // skip answers that failed or were stopped before their first token
  const said = talk.filter(({ role, content, bad }) => role === "user" || (content && !bad));
  const told = said.map(({ role, content, pictures: shown }) => {
    if (!shown?.length) return { role, content };
    const parts = shown.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: [...parts, { type: "text", text: content }] };
  });
  return system ? [{ role: "system", content: system }, ...told] : told;
}

async function ask() {
  const answer = { role: "assistant", content: "" };
  const body = { model: model.id, messages: messages(), stream: true, return_token_ids: true, ...unsaid(), ...sampling() };
  talk.push(answer);
  running = new AbortController();
  draw();
  follow();
  const article = $("talk").lastElementChild;
  article.setAttribute("aria-busy", "true");
  article.querySelector(".foot").hidden = true;
  const waiting = h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
  article.prepend(waiting);
  say("Answering");
  const pace = new Pace();
  let frame = 0;
  const paint = () => {
    frame = 0;
    const near = bottom() < 60;
    article.view.show(answer.content);
    $("pace").textContent = pace.told();
    $("keyhint").hidden = true;
    if (near) follow();
  };
  try {
    const response = await call("/v1/chat/completions", body, running.signal);
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      const tokens = choice.token_ids?.length ?? (choice.delta?.content ? 1 : 0);
      if (tokens) pace.more(tokens);
      if (choice.delta?.content) {
        waiting.remove();
        answer.content += choice.delta.content;
        frame ||= requestAnimationFrame(paint);
      }
      if (choice.finish_reason === "length") answer.note = "The answer was cut: it reached the most tokens it may have.";
    }
    say(`Answer: ${answer.content}`);
  } catch (error) {
    if (error.name === "AbortError") {
      answer.note = "Stopped.";
      say("Stopped");
    } else {
      answer.note = error.message;
      answer.bad = true;
      say(error.message);
      if (error instanceof Refused && error.status === 401) openSettings("key");
      asked();
    }
  }
  if (frame) cancelAnimationFrame(frame);
  running = null;
  answer.figures = pace.told();
  $("pace").textContent = "";
  $("keyhint").hidden = false;
  const focused = document.activeElement;
  const near = bottom() < 60;
  draw();
  if (near) follow();
  if (focused === $("stop") || focused === document.body) $("message").focus();
}

function send() {
  const content = $("message").value.trim();
  if (running || !model?.ready || !(content || pictures.length)) return;
  trouble("");
  talk.push({ role: "user", content, ...(pictures.length ? { pictures } : {}) });
  pictures = [];
  showPictures();
  $("message").value = "";
  grow();
  ask();
}

function again(index) {
  if (running || !model?.ready) return;
  talk = talk.slice(0, index);
  ask();
}

function edit(index) {
  if (running) return;
  const article = document.querySelectorAll("#talk article")[index];
  const field = h("textarea", { rows: Math.min(12, talk[index].content.split("\n").length + 1), "aria-label": "Edit the message" });
  field.value = talk[index].content;
  const back = () => { draw(); document.querySelectorAll("#talk article")[index].querySelector(".foot button").focus(); };
  const done = () => {
    const content = field.value.trim();
    if (!content || !model?.ready) return;
    talk = [...talk.slice(0, index), { ...talk[index], content }];
    $("message").focus();
    ask();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); back(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
  });
  article.replaceChildren(field, h("div", { class: "foot" }, act("Cancel", "Cancel the edit", back), act("Send", "Send the edited message", done)));
  field.focus();
}

export function fresh() {
  running?.abort();
  talk = [];
  trouble("");
  draw();
  $("message").focus();
}

// -- pictures

function showPictures() {
  $("pictures").hidden = !pictures.length;
  $("pictures").replaceChildren(...pictures.map((src, i) => h("figure", {}, h("img", { src, alt: `Picture ${i + 1} to send` }),
    h("button", { type: "button", class: "icon", "aria-label": `Remove picture ${i + 1}`, onclick: () => {
      pictures.splice(i, 1);
      showPictures();
      $("message").focus();
    } }, h("span", { "aria-hidden": "true" }, "×")))));
  refresh();
}

async function addPictures(files) {
  trouble("");
  if (!model?.pictures) { trouble("This model does not read pictures."); return; }
  for (const file of [...files]) { // a copy: clearing the input empties the list
    if (!file.type.startsWith("image/")) { trouble("Only pictures can be added."); continue; }
    if (pictures.length >= MOST_PICTURES) { trouble(`A message takes up to ${MOST_PICTURES} pictures.`); break; }
    try { pictures.push((await prepared(file, 1344)).url); } catch (error) { trouble(error.message); }
  }
  showPictures();
}

export function start(unwell) {
  asked = unwell;
  const field = $("message");
  talk = kept("talk") || [];
  $("ideas").append(...IDEAS.map((idea) => h("button", { type: "button", onclick: () => {
    field.value = idea;
    grow();
    field.focus();
  } }, idea)));
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !field.value && !running) {
      const last = talk.findLastIndex((said) => said.role === "user");
      if (last >= 0) { event.preventDefault(); edit(last); }
    }
  });
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("settings").open) running.abort();
  });
  $("fresh").addEventListener("click", fresh);
  $("add-picture").addEventListener("click", () => $("picture-file").click());
  $("picture-file").addEventListener("change", (event) => { addPictures(event.target.files); event.target.value = ""; });
  field.addEventListener("paste", (event) => { if (event.clipboardData.files.length) addPictures(event.clipboardData.files); });
  const chat = $("chat");
  chat.addEventListener("dragover", (event) => { event.preventDefault(); if (model?.pictures) $("composer").classList.add("over"); });
  chat.addEventListener("dragleave", () => $("composer").classList.remove("over"));
  chat.addEventListener("drop", (event) => {
    event.preventDefault();
    $("composer").classList.remove("over");
    if (event.dataTransfer.files.length) addPictures(event.dataTransfer.files);
  });
  draw();
  follow();
}
