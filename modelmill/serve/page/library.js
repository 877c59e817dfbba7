// The list of conversations: search, open, rename, export, import, delete.
import { $, closeByBackdrop, h, icon, save, say, trouble } from "./dom.js";
import { tellOtherTabs, watchOtherTabs } from "./conversation.js";
import { keep, kept } from "./storage.js";
import { search, wordsOf } from "./search.js";
import { store } from "./store.js";
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
const TIME = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit" });
const WEEKDAY = new Intl.DateTimeFormat([], { weekday: "long" });
const DATE = new Intl.DateTimeFormat([], { dateStyle: "medium" });

/** @type {Events} */
let events;
let current = null;
let picked = null; // the conversation of the dialog
let timer = 0;
let turns = 0; // counts searches
let unwritten = false; // whether a conversation would be lost with the tab, since the storage is full

function dateOf(time) {
  const date = new Date(time);
  const today = new Date().toDateString() === date.toDateString();
  const recent = Date.now() - time < 6 * DAY_MS;
  return (today ? TIME : recent ? WEEKDAY : DATE).format(date);
}

/** Text with the searched words marked. */
function marked(text, words) {
  if (!words.length) return [text];
  const places = new RegExp(`(${words.map((word) => word.replace(/[^\p{L}\p{N}]/gu, "\\$&")).join("|")})`, "i");
  return text.split(places).map((part, at) => (at % 2 ? h("mark", {}, part) : part));
}

function row({ conversation, excerpt }, words, lost) {
  const { id, title, updated } = conversation;
  const open = h("button", { type: "button", class: "open", "aria-current": id === current ? "true" : null, onclick: () => { close(); events.open(id); } },
    h("span", { class: "title" }, ...marked(title, words)),
    h("span", { class: lost ? "date lost" : "date" }, lost ? "Not kept: export it" : dateOf(updated)),
    excerpt ? h("span", { class: "excerpt" }, ...marked(excerpt, words)) : null);
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
  const ids = (await store()).unwritten;
  unwritten = ids.size > 0;
  showRows(hits.map((hit) => row(hit, wordsOf(word), ids.has(hit.conversation.id))));
  $("nothing").hidden = hits.length > 0;
  $("nothing").textContent = word ? "No conversation has these words." : "Conversations appear here.";
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
    tellOtherTabs({ id: null });
  } catch (error) {
    trouble(error.name === "QuotaExceededError" ? "The browser's storage is full: not all of the file is kept. Delete other conversations." : error.message);
  }
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
  tellOtherTabs({ id: picked.id });
  await refresh();
}

async function remove(id) {
  const shelf = await store();
  events.removed(id);
  if (id) await shelf.remove(id);
  else await shelf.clear();
  tellOtherTabs({ id, deleted: true });
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
  watchOtherTabs(() => { refresh(); });
  addEventListener("beforeunload", (event) => { if (unwritten) event.preventDefault(); });
  $("not-kept").hidden = (await store()).lasting;
}
