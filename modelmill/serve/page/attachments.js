// Files of the next message: texts, and pictures where the model sees.
import { $, h, icon, trouble } from "./dom.js";
import { prepared } from "./picture.js";

/** @typedef {import("./tree.js").TextFile} TextFile */

const MAX_PICTURES = 8;
const MAX_FILES = 16;
const MAX_TEXT_BYTES = 1 << 20;
const LONGEST_SIDE = 1344; // pixels

/** @type {string[]} data: URLs */
let pictures = [];
/** @type {TextFile[]} */
let files = [];
let sees = false;
let changed = () => {};

/** Whether there are any. */
export const any = () => pictures.length + files.length > 0;

/** What goes with the message; the composer is empty afterwards. @returns {{pictures?: string[], files?: TextFile[]}} */
export function take() {
  const taken = { ...(pictures.length ? { pictures } : {}), ...(files.length ? { files } : {}) };
  pictures = [];
  files = [];
  draw();
  return taken;
}

/** Whether the model reads pictures. @param {boolean} can */
export function allowPictures(can) {
  sees = can;
  $("attachment-file").accept = can ? "" : "text/*,.md,.json,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.yaml,.yml,.toml,.csv,.log,.tex,.sql";
  if (!can && pictures.length) { pictures = []; draw(); }
}

function removeButton(label, remove) {
  return h("button", { type: "button", class: "icon", "aria-label": label, onclick: () => {
    remove();
    draw();
    $("message").focus();
  } }, h("span", { "aria-hidden": "true" }, "×"));
}

function draw() {
  $("attachments").hidden = !any();
  $("attachments").replaceChildren(
    ...pictures.map((src, i) => h("li", {}, h("img", { src, alt: `Picture ${i + 1} to send` }),
      removeButton(`Remove picture ${i + 1}`, () => pictures.splice(i, 1)))),
    ...files.map(({ name }, i) => h("li", { class: "file" }, icon("file"), h("span", {}, name),
      removeButton(`Remove file ${name}`, () => files.splice(i, 1)))));
  changed();
}

/** The text of a file; null if it is none. */
async function textOf(file) {
  const bytes = await file.arrayBuffer();
  if (new Uint8Array(bytes).includes(0)) return null;
  try { return new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { return null; }
}

async function addFile(file) {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!sees) throw new Error("This model does not read pictures.");
    if (pictures.length >= MAX_PICTURES) throw new Error(`A message takes up to ${MAX_PICTURES} pictures.`);
    pictures.push((await prepared(file, LONGEST_SIDE)).url);
    return;
  }
  if (files.length >= MAX_FILES) throw new Error(`A message takes up to ${MAX_FILES} files.`);
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${file.name} is larger than 1 MiB.`);
  const text = await textOf(file);
  if (text === null) throw new Error(`${file.name} is not a text${sees ? " or a picture" : ""}.`);
  files.push({ name: file.name, text });
}

/** @param {Iterable<File>} given */
async function add(given) {
  trouble("");
  for (const file of [...given]) { // a copy: clearing the input empties the list
    try { await addFile(file); } catch (error) { trouble(error.message); }
  }
  draw();
}

/** @param {() => void} told is called when files have been added or removed */
export function start(told) {
  changed = told;
  $("attach").addEventListener("click", () => $("attachment-file").click());
  $("attachment-file").addEventListener("change", (event) => { add(event.target.files); event.target.value = ""; });
  $("message").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) { event.preventDefault(); add(event.clipboardData.files); }
  });
  const chat = $("chat");
  chat.addEventListener("dragover", (event) => { event.preventDefault(); $("composer").classList.add("over"); });
  chat.addEventListener("dragleave", () => $("composer").classList.remove("over"));
  chat.addEventListener("drop", (event) => {
    event.preventDefault();
    $("composer").classList.remove("over");
    if (event.dataTransfer.files.length) add(event.dataTransfer.files);
  });
}
