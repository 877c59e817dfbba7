// The list of conversations: search, open, rename, export, import, delete.
import { $, closeByBackdrop, h, icon, save, say, trouble } from "./dom.js";
import { tellOtherTabs, watchOtherTabs } from "./conversation.js";
import { keep, kept } from "./storage.js";
import { search, store } from "./store.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";

/** @typedef {import("./tree.js").Conversation} Conversation */

/**
 * @typedef {object} Events
 * @property {(id: string) => void} open a conversation
 * @property {() => void} fresh a new one
 * @property {(id: string|null) => void} removed null: all of them
 * @property {(id: string, title: string) => void} renamed
 */

const NARROW = matchMedia("(max-width: 60rem)");
const DAY_MS = 86_400_000;
const SEARCH_DELAY_MS = 150;

/** @type {Events} */
let events;
let current = null;
let picked = null; // the conversation of the dialog
let timer = 0;
let turns = 0; // counts searches

function dateOf(time) {
  const date = new Date(time);
  const today = new Date().toDateString() === date.toDateString();
  const recent = Date.now() - time < 6 * DAY_MS;
  return date.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : recent ? { weekday: "long" } : { dateStyle: "medium" });
}

/** Text with the searched word marked. */
function marked(text, word) {
  const at = word ? text.toLowerCase().indexOf(word.toLowerCase()) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), h("mark", {}, text.slice(at, at + word.length)), text.slice(at + word.length)];
}

function row({ conversation, excerpt }, word) {
  const { id, title, updated } = conversation;
  const open = h("button", { type: "button", class: "open", "aria-current": id === current ? "true" : null, onclick: () => { close(); events.open(id); } },
    h("span", { class: "title" }, ...marked(title, word)), h("span", { class: "date" }, dateOf(updated)),
    excerpt ? h("span", { class: "excerpt" }, ...marked(excerpt, word)) : null);
  const more = h("button", { type: "button", class: "icon", "aria-label": `Options of ${title}`, "aria-haspopup": "dialog",
    onclick: () => openOptions(conversation) }, icon("more"));
  return h("li", { "data-id": id }, open, more);
}

/** Replace the rows; a button that has the focus keeps it. */
function showRows(rows) {
  const focused = document.activeElement;
  const id = /** @type {HTMLElement|null} */ (focused?.closest("#conversations li"))?.dataset.id;
  const name = focused?.classList.contains("open") ? ".open" : ".icon";
  $("conversations").replaceChildren(...rows);
  if (id) /** @type {any} */ (document.querySelector(`#conversations li[data-id="${CSS.escape(id)}"] ${name}`))?.focus();
}

/** Show the list again. */
export async function refresh() {
  const word = $("search").value.trim();
  const turn = ++turns;
  const hits = await search(word);
  if (turn !== turns) return; // a later search has begun
  showRows(hits.map((hit) => row(hit, word)));
  $("nothing").hidden = hits.length > 0;
  $("nothing").textContent = word ? "No conversation has this text." : "Conversations appear here.";
  $("export-all").disabled = $("delete-all").disabled = !hits.length && !word;
  if (word) say(`${hits.length} conversation${hits.length === 1 ? "" : "s"} found`);
}

/** Mark the conversation that is shown. @param {string|null} id */
export function showCurrent(id) {
  current = id;
  return refresh();
}

async function whole(conversation) {
  return { conversation, messages: await (await store()).messages(conversation.id) };
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";

async function exportAs(markdown) {
  const all = await whole(picked);
  const [text, type, end] = markdown ? [toMarkdown(all), "text/markdown", "md"] : [toJson([all]), "application/json", "json"];
  save(new Blob([text], { type }), `${fileName(picked.title)}.${end}`);
}

async function exportAll() {
  const all = await Promise.all((await (await store()).list()).map(whole));
  save(new Blob([toJson(all)], { type: "application/json" }), "conversations.json");
}

async function importFile(file) {
  trouble("");
  try {
    const all = fromJson(await file.text());
    const shelf = await store();
    for (const { conversation, messages } of all) await shelf.put(conversation, messages);
    say(`${all.length} conversation${all.length === 1 ? "" : "s"} imported`);
    tellOtherTabs();
  } catch (error) { trouble(error.message); }
  await refresh();
}

function openOptions(conversation) {
  picked = conversation;
  $("title").value = conversation.title;
  confirmDelete(false);
  $("options").showModal();
  $("title").select();
}

function confirmDelete(asked) {
  $("options-actions").hidden = asked;
  $("options-confirm").hidden = !asked;
  if (asked) $("delete-no").focus();
}

async function rename() {
  const title = $("title").value.trim();
  if (!title || title === picked.title) return;
  await (await store()).put({ ...picked, title });
  events.renamed(picked.id, title);
  tellOtherTabs();
  await refresh();
}

async function remove(id) {
  const shelf = await store();
  events.removed(id);
  if (id) await shelf.remove(id);
  else await shelf.clear();
  tellOtherTabs();
  await refresh();
  say(id ? "Conversation deleted" : "All conversations deleted");
  if (!NARROW.matches || isOpen()) $("search").focus();
}

/** Whether the list is shown. */
const isOpen = () => !$("library").hidden;

function setOpen(open) {
  $("library").hidden = !open;
  $("toggle-library").setAttribute("aria-expanded", String(open));
  const covers = open && NARROW.matches;
  $("library-backdrop").hidden = !covers;
  document.querySelector("main").inert = covers;
}

/** On a narrow screen the list covers the conversation. */
function close() {
  if (!NARROW.matches || !isOpen()) return;
  setOpen(false);
  $("toggle-library").focus();
}

/** Show or hide the list. */
export function toggle() {
  const open = !isOpen();
  setOpen(open);
  if (!NARROW.matches) keep("library", open);
  if (open && NARROW.matches) $("search").focus();
}

/** Show the list with the focus in its search. */
export function focusSearch() {
  setOpen(true);
  $("search").focus();
}

function startOptions() {
  $("rename").addEventListener("submit", (event) => { event.preventDefault(); rename(); $("options").close(); });
  $("export-markdown").addEventListener("click", () => exportAs(true));
  $("export-json").addEventListener("click", () => exportAs(false));
  $("delete").addEventListener("click", () => confirmDelete(true));
  $("delete-no").addEventListener("click", () => { confirmDelete(false); $("delete").focus(); });
  $("delete-yes").addEventListener("click", () => { $("options").close(); remove(picked.id); });
  closeByBackdrop($("options"));
  $("delete-all").addEventListener("click", () => { $("delete-every").showModal(); $("delete-every-no").focus(); });
  $("delete-every-no").addEventListener("click", () => $("delete-every").close());
  $("delete-every-yes").addEventListener("click", () => { $("delete-every").close(); remove(null); });
}

/** @param {Events} given */
export async function start(given) {
  events = given;
  startOptions();
  $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(refresh, SEARCH_DELAY_MS); });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && $("search").value) { event.stopPropagation(); event.preventDefault(); $("search").value = ""; refresh(); }
  });
  $("library-fresh").addEventListener("click", () => { close(); events.fresh(); });
  $("export-all").addEventListener("click", exportAll);
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (file) await importFile(file);
    event.target.value = "";
  });
  $("toggle-library").addEventListener("click", toggle);
  $("library-backdrop").addEventListener("click", close);
  $("library").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  NARROW.addEventListener("change", () => setOpen(!NARROW.matches && kept("library") !== false));
  setOpen(!NARROW.matches && kept("library") !== false);
  watchOtherTabs(refresh);
  $("not-kept").hidden = (await store()).lasting;
}
