// Renders Markdown as elements. Text of a model is never parsed as HTML, links are http(s) only, images are not loaded.
import { copied, h } from "./dom.js";

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\(([^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"[^"]*")?\)|(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]])|\\([\\`*_{}[\]()#+\-.!~|>])|(?<!\w)_(?=[^\s_])([^_\n]*[^\s_])_(?!\w)/g;
const DEEPEST = 12;

function link(text, target, depth) {
  let url = null;
  try { url = new URL(target); } catch { /* no address */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return [text];
  return [h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...inline(text, depth))];
}

function inline(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const out = [];
  let at = 0;
  for (const m of text.matchAll(INLINE)) {
    out.push(text.slice(at, m.index));
    at = m.index + m[0].length;
    if (m[2] != null) out.push(h("code", {}, m[2].replace(/^ (.*) $/s, "$1")));
    else if (m[3] != null) out.push(h("strong", {}, ...inline(m[3], depth + 1)));
    else if (m[4] != null) out.push(h("em", {}, ...inline(m[4], depth + 1)));
    else if (m[5] != null) out.push(h("del", {}, ...inline(m[5], depth + 1)));
    else if (m[7] != null) out.push(...link(m[6] || m[7], m[7], depth + 1));
    else if (m[8] != null) out.push(...link(m[8], m[8], DEEPEST + 1));
    else if (m[10] != null) out.push(h("em", {}, ...inline(m[10], depth + 1)));
    else out.push(m[9]);
  }
  out.push(text.slice(at));
  return out.filter((part) => part !== "");
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|$)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEAD = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /\|/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const starts = (line) => FENCE.test(line) || ITEM.test(line) || RULE.test(line) || HEAD.test(line) || QUOTE.test(line);

// Top-level blocks: [{kind, lines}]; the last one may be incomplete.
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  for (let i = 0; i < lines.length;) {
    const from = i;
    const line = lines[i];
    const fence = FENCE.exec(line);
    let kind = "p";
    if (!line.trim()) { i++; continue; }
    if (fence) {
      kind = "code";
      for (i++; i < lines.length && !(lines[i].trim().startsWith(fence[2]) && !lines[i].trim().replace(/[`~]/g, "")); i++);
      i++;
    } else if (HEAD.test(line)) { kind = "head"; i++;
    } else if (RULE.test(line)) { kind = "hr"; i++;
    } else if (QUOTE.test(line)) {
      kind = "quote";
      for (; i < lines.length && lines[i].trim() && (QUOTE.test(lines[i]) || !starts(lines[i])); i++);
    } else if (ITEM.test(line)) {
      kind = "list";
      const [, indent, mark] = ITEM.exec(line);
      const another = (each) => { // a list of the other type begins
        const m = ITEM.exec(each);
        return m && m[1].length <= indent.length + 1 && /\d/.test(m[2]) !== /\d/.test(mark);
      };
      for (i++; i < lines.length; i++) {
        if (another(lines[i])) break;
        if (ITEM.test(lines[i]) || /^\s{2,}\S/.test(lines[i])) continue;
        if (!lines[i].trim()) {
          const next = lines[i + 1] ?? "";
          if (ITEM.test(next) || /^\s{2,}\S/.test(next)) continue;
          break;
        }
        if (starts(lines[i])) break;
      }
    } else if (ROW.test(line) && ROW.test(lines[i + 1] ?? "") && DIVIDER.test(lines[i + 1])) {
      kind = "table";
      for (i += 2; i < lines.length && ROW.test(lines[i]); i++);
    } else {
      for (i++; i < lines.length && lines[i].trim() && !starts(lines[i]); i++);
    }
    found.push({ kind, lines: lines.slice(from, i) });
  }
  return found;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const m = ITEM.exec(line);
    if (m && m[1].length <= indent.length + 1) items.push([m[3] ?? ""]);
    else items.at(-1).push(line);
  }
  const ordered = /\d/.test(mark);
  const made = items.map(([first, ...rest]) => {
    const margin = Math.min(...rest.filter((l) => l.trim()).map((l) => /^\s*/.exec(l)[0].length), 8);
    const inner = rest.map((l) => l.slice(Math.min(margin, /^\s*/.exec(l)[0].length)));
    if (!rest.some((l) => l.trim())) return h("li", {}, ...inline(first));
    return h("li", {}, ...elements([first, ...inner].join("\n"), depth + 1));
  });
  return h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, ...made);
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function table(lines) {
  const row = (tag, line) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, row("th", lines[0])),
    h("tbody", {}, ...lines.slice(2).map((line) => row("td", line)))));
}

function code(lines) {
  const [, , mark] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = h("button", { type: "button", "aria-label": "Copy the code", onclick: async () => {
    await navigator.clipboard?.writeText(text);
    copied(copy);
  } }, "Copy");
  return h("div", { class: "code" }, h("pre", { tabindex: "0" }, h("code", {}, text)), copy);
}

export function element({ kind, lines }, depth = 0) {
  if (kind === "code") return code(lines);
  if (kind === "hr") return h("hr");
  if (kind === "head") {
    const [, level, text] = HEAD.exec(lines[0]);
    return h(`h${Math.min(level.length + 1, 4)}`, {}, ...inline(text));
  }
  if (kind === "list" && depth < DEEPEST) return list(lines, depth);
  if (kind === "quote" && depth < DEEPEST) {
    return h("blockquote", {}, ...elements(lines.map((l) => QUOTE.exec(l)?.[1] ?? l).join("\n"), depth + 1));
  }
  if (kind === "table") return table(lines);
  const parts = lines.flatMap((line, i) => {
    const hard = i < lines.length - 1;
    return [...inline(line.trim()), ...(hard ? [h("br")] : [])];
  });
  return h("p", {}, ...parts);
}

export const elements = (text, depth = 0) => blocks(text).map((block) => element(block, depth));

// A view that is given the whole text at each update, and changes only the blocks that differ.
export class View {
  constructor(root) {
    this.root = root;
    this.known = [];
  }

  show(text) {
    const now = blocks(text).map((block) => ({ ...block, source: block.kind + block.lines.join("\n") }));
    let same = 0;
    while (same < now.length && this.known[same] === now[same].source) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...now.slice(same).map((block) => element(block)));
    this.known = now.map((block) => block.source);
  }
}
