// A photo, points and boxes, and the masks of the server.
import { $, h, save, trouble } from "./dom.js";
import { call, Refused } from "./api.js";
import { composed, paint, pixels } from "./masks.js";
import { openSettings } from "./settings.js";
import { prepared } from "./picture.js";

const LONGEST = 2048;
const overlay = $("overlay");

let model = null;
let photo = null; // {canvas, url, id, name}
let marks = []; // {kind: "point", x, y, label} | {kind: "box", box}, in order of creation
let masks = [];
let chosen = -1;
let whole = false; // whether the masks are of all objects
let asking = null; // AbortController of the running request
let aim = null; // the keyboard's crosshair
let corner = null; // first corner of a box
let pointer = null;
let keyed = false; // whether the crosshair is moved by keys

export function use(found) {
  model = found;
  if (photo && !photo.id && found?.ready && !asking) look();
  enable();
}

function enable() {
  $("undo").disabled = $("clear").disabled = !marks.length && !masks.length;
  $("everything").disabled = !model?.ready || Boolean(asking);
  $("download").disabled = $("what").disabled = !masks.length;
  $("cancel").hidden = !(asking && whole);
  overlay.classList.toggle("wait", Boolean(asking));
}

const tell = (text) => { $("told").textContent = text; };

// -- requests

async function request(body) {
  asking?.abort();
  const mine = asking = new AbortController();
  enable();
  const given = { model: model.id, ...body };
  try {
    let answer;
    if (photo.id) {
      try {
        answer = await call("/v1/segment", { ...given, image_id: photo.id }, mine.signal);
      } catch (error) {
        if (error.code !== "image_not_found") throw error;
      }
    }
    answer ??= await call("/v1/segment", { ...given, image: photo.url }, mine.signal);
    const found = await answer.json();
    photo.id = found.image.id;
    return found;
  } catch (error) {
    if (error.name === "AbortError") return null;
    tell("");
    trouble(error.message);
    if (error instanceof Refused && error.status === 401) openSettings("key");
    return null;
  } finally {
    if (asking === mine) asking = null;
    enable();
  }
}

async function look() {
  tell("Looking at the photo …");
  const found = await request({});
  if (found && !marks.length) tell("Ready: click on something.");
}

async function segment() {
  if (!model?.ready || !photo) return;
  const points = marks.filter((mark) => mark.kind === "point");
  const box = marks.findLast((mark) => mark.kind === "box")?.box;
  whole = false;
  if (!points.length && !box) {
    asking?.abort();
    show([], "");
    return;
  }
  tell("Looking …");
  const began = performance.now();
  const body = { multimask: points.length === 1 && !box };
  if (points.length) Object.assign(body, { points: points.map(({ x, y }) => [x, y]), labels: points.map(({ label }) => label) });
  if (box) body.box = box;
  const found = await request(body);
  if (found) show(found.masks, `${Math.round(performance.now() - began)} ms`);
}

async function everything() {
  if (!model?.ready || !photo) return;
  whole = true;
  marks = [];
  show([], "");
  tell("Looking for everything; this takes a while …");
  const began = performance.now();
  const found = await request({ everything: true });
  if (!found) { if (!asking) tell("Stopped."); return; }
  show(found.masks, `${((performance.now() - began) / 1000).toFixed(1)} s`);
  chosen = -1;
  redraw();
}

function show(found, took) {
  masks = found.map((mask) => ({ ...mask, mask: pixels(mask.rle) }));
  chosen = masks.length ? 0 : -1;
  const few = !whole && masks.length > 1;
  $("masks").hidden = !few;
  $("masks").replaceChildren(h("legend", { class: "hidden" }, "Mask"), ...(few ? masks.map((mask, i) => {
    const input = h("input", { type: "radio", name: "mask", checked: i === 0, onchange: () => { chosen = i; redraw(); describe(took); } });
    return h("label", {}, input, h("span", {}, `${"ABC"[i]} ${percent(mask)}`));
  }) : []));
  describe(took);
  redraw();
}

const percent = (mask) => `${Math.round(100 * Math.min(mask.score, 1))} %`;

function describe(took) {
  if (!masks.length) tell(whole && took ? `Nothing found in ${took}.` : "");
  else if (whole) tell(`${masks.length} masks in ${took}. Click on one to choose it.`);
  else {
    const { box: [x0, y0, x1, y1], area } = masks[chosen];
    const share = (100 * area) / (photo.canvas.width * photo.canvas.height);
    tell(`Confidence ${percent(masks[chosen])} · ${x1 - x0 + 1} × ${y1 - y0 + 1} pixels · ${share.toFixed(1)} % of the photo · ${took}`);
  }
}

// -- drawing

function redraw() {
  const one = !whole && masks[chosen];
  paint(overlay, one ? [one] : masks, whole ? chosen : -1);
  const pen = overlay.getContext("2d");
  const unit = overlay.width / (overlay.clientWidth || overlay.width);
  for (const mark of marks) {
    if (mark.kind === "box") frame(pen, mark.box, unit);
    else dot(pen, mark, unit);
  }
  if (corner && (pointer || aim)) frame(pen, ordered(corner, pointer || aim), unit);
  if (keyed && document.activeElement === overlay) cross(pen, aim, unit);
  enable();
}

function frame(pen, [x0, y0, x1, y1], unit) {
  for (const [style, width] of [["#fff", 4], ["#0f6b5c", 2]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width * unit;
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
}

function dot(pen, { x, y, label }, unit) {
  pen.beginPath();
  pen.arc(x, y, 7 * unit, 0, 2 * Math.PI);
  pen.fillStyle = label ? "#0f6b5c" : "#b3261e";
  pen.fill();
  pen.lineWidth = 2 * unit;
  pen.strokeStyle = "#fff";
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x - 3 * unit, y);
  pen.lineTo(x + 3 * unit, y);
  if (label) { pen.moveTo(x, y - 3 * unit); pen.lineTo(x, y + 3 * unit); }
  pen.stroke();
}

function cross(pen, { x, y }, unit) {
  for (const [style, width] of [["#fff", 4], ["#111", 1.5]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width * unit;
    pen.beginPath();
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      pen.moveTo(x + 5 * dx * unit, y + 5 * dy * unit);
      pen.lineTo(x + 16 * dx * unit, y + 16 * dy * unit);
    }
    pen.stroke();
  }
}

const ordered = (a, b) => [Math.min(a.x, b.x), Math.min(a.y, b.y), Math.max(a.x, b.x), Math.max(a.y, b.y)];

// -- pointer and keys

const tool = () => document.querySelector("input[name=tool]:checked").value;

function place(event) {
  const { left, top, width, height } = overlay.getBoundingClientRect();
  const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
  return {
    x: Math.floor(clamp(((event.clientX - left) / width) * overlay.width, overlay.width)),
    y: Math.floor(clamp(((event.clientY - top) / height) * overlay.height, overlay.height)),
  };
}

function mark(at, label) {
  if (whole && masks.length) {
    const p = at.y * overlay.width + at.x;
    const here = masks.map((one, i) => [one.area, i]).filter(([, i]) => masks[i].mask[p]).sort((a, b) => a[0] - b[0]);
    chosen = here.length ? here[0][1] : -1;
    tell(chosen < 0 ? `${masks.length} masks.` : `Mask ${chosen + 1} of ${masks.length}, confidence ${percent(masks[chosen])}.`);
    redraw();
    return;
  }
  marks.push({ kind: "point", ...at, label });
  redraw();
  segment();
}

function endBox(at) {
  const box = ordered(corner, at);
  corner = pointer = null;
  if (box[2] - box[0] < 3 || box[3] - box[1] < 3) { redraw(); return; }
  if (whole) { masks = []; whole = false; }
  marks = [...marks.filter((each) => each.kind !== "box"), { kind: "box", box }];
  redraw();
  segment();
}

function undo() {
  if (corner) corner = null;
  else if (whole) { masks = []; whole = false; }
  else marks.pop();
  redraw();
  segment();
}

function keys(event) {
  const step = event.shiftKey ? Math.max(overlay.width, overlay.height) / 20 : Math.max(overlay.width, overlay.height) / 100;
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (moves[key]) {
    const [dx, dy] = moves[key];
    pointer = null;
    keyed = true;
    aim = {
      x: Math.round(Math.max(0, Math.min(overlay.width - 1, aim.x + dx * step))),
      y: Math.round(Math.max(0, Math.min(overlay.height - 1, aim.y + dy * step))),
    };
    redraw();
  } else if (key === "Enter" || key === " ") {
    if (corner) endBox(aim);
    else if (tool() === "box") { corner = aim; redraw(); } else mark(aim, tool() === "remove" ? 0 : 1);
  } else if (key === "x") mark(aim, 0);
  else if (key === "b") { if (corner) endBox(aim); else { corner = aim; redraw(); } }
  else if (key === "z") undo();
  else if (key === "Escape" && corner) { corner = null; redraw(); }
  else return;
  event.preventDefault();
}

// -- the photo

async function open(file) {
  if (!file) return;
  trouble("");
  let found;
  try { found = await prepared(file, LONGEST); } catch (error) { trouble(error.message); return; }
  asking?.abort();
  photo = { ...found, id: null, name: file.name.replace(/\.[^.]*$/, "") || "photo" };
  for (const canvas of [$("photo"), overlay]) { canvas.width = found.width; canvas.height = found.height; }
  $("photo").getContext("2d").drawImage(found.canvas, 0, 0);
  overlay.setAttribute("aria-label", `Photo ${file.name}, ${found.width} by ${found.height} pixels`);
  marks = [];
  whole = false;
  corner = pointer = null;
  aim = { x: found.width >> 1, y: found.height >> 1 };
  $("drop").hidden = true;
  $("bench").hidden = false;
  show([], "");
  overlay.focus({ preventScroll: true });
  if (model?.ready) look();
  else tell("The model is not ready yet.");
}

function download() {
  const kind = $("what").value;
  composed(photo.canvas, whole ? masks : [masks[chosen]], whole ? chosen : 0, kind)
    .toBlob((blob) => save(blob, `${photo.name}-${kind}.png`), "image/png");
}

export function start() {
  const file = $("photo-file");
  for (const id of ["choose", "another"]) $(id).addEventListener("click", () => file.click());
  file.addEventListener("change", () => { open(file.files[0]); file.value = ""; });
  const area = $("segment");
  area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("over"); });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => { event.preventDefault(); area.classList.remove("over"); open(event.dataTransfer.files[0]); });
  document.addEventListener("paste", (event) => { if (!area.hidden) open([...event.clipboardData.files].find((each) => each.type.startsWith("image/"))); });
  overlay.addEventListener("contextmenu", (event) => event.preventDefault());
  overlay.addEventListener("pointerdown", (event) => {
    overlay.focus({ preventScroll: true });
    aim = place(event);
    keyed = false;
    if (tool() === "box" && event.button === 0) {
      corner = aim;
      overlay.setPointerCapture(event.pointerId);
    }
  });
  overlay.addEventListener("pointermove", (event) => { if (corner && event.buttons) { pointer = place(event); redraw(); } });
  overlay.addEventListener("pointerup", (event) => {
    if (corner && tool() === "box") endBox(place(event));
    else if (event.button === 2 || event.shiftKey) mark(place(event), 0);
    else if (event.button === 0) mark(place(event), tool() === "remove" ? 0 : 1);
  });
  overlay.addEventListener("pointercancel", () => { corner = pointer = null; redraw(); });
  overlay.addEventListener("keydown", keys);
  for (const name of ["focus", "blur"]) {
    overlay.addEventListener(name, () => {
      keyed = overlay.matches(":focus-visible");
      if (photo) redraw();
    });
  }
  $("undo").addEventListener("click", undo);
  $("clear").addEventListener("click", () => { marks = []; masks = []; whole = false; corner = null; redraw(); segment(); });
  $("everything").addEventListener("click", everything);
  $("cancel").addEventListener("click", () => asking?.abort());
  $("download").addEventListener("click", download);
  enable();
}

