// Elements of markdown-it's tokens. Each is created by its name here: nothing is parsed as HTML, links are http(s) and
// mailto only, pictures become links.
import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { formula } from "./math.js";

const TAGS = {
  paragraph: "p", bullet_list: "ul", list_item: "li", blockquote: "blockquote", thead: "thead", tbody: "tbody", tr: "tr",
  strong: "strong", em: "em", s: "del",
};
const TASK = /^\[([ xX])\]\s/;

/**
 * Whether a link may be followed.
 * @param {string} target
 * @returns {boolean}
 */
export const isWebLink = (target) => /^(https?:\/\/|mailto:)/i.test(target);

function link(target, ...children) {
  return h("a", { href: new URL(target).href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function safeLink(target, ...children) {
  try { return link(target, ...children); } catch { return h("span", {}, ...children); } // no valid address
}

/** A link inside the answer: it moves the focus, and leaves the address alone. */
function jump(id, given, text) {
  return h("a", { href: `#${id}`, ...given, onclick: (event) => {
    event.preventDefault();
    const target = document.getElementById(id);
    target?.scrollIntoView({ block: "nearest" });
    target?.focus();
  } }, text);
}

/** Builds the elements of one list of tokens. */
class Builder {
  /**
   * @param {string} prefix of ids
   * @param {boolean} open whether the last block is still being written
   */
  constructor(prefix, open) {
    this.prefix = prefix;
    this.open = open;
    this.root = document.createDocumentFragment();
    this.places = [/** @type {any} */ (this.root)];
  }

  get place() { return this.places.at(-1); }

  enter(element, inner = element) {
    this.place.append(element);
    this.places.push(inner);
  }

  add(node) { this.place.append(node); }

  tokens(tokens) {
    tokens.forEach((token, at) => {
      const name = token.type.replace(/_(open|close)$/, "");
      if (token.nesting < 0) { this.places.pop(); return; }
      if (token.nesting > 0) this.opening(name, token);
      else this.single(name, token, tokens, at);
    });
    return this;
  }

  opening(name, token) {
    const attribute = (key) => token.attrGet(key);
    if (name === "paragraph" && token.hidden) this.places.push(this.place);
    else if (name === "heading") this.enter(h(`h${Math.min(Number(token.tag[1]) + 1, 4)}`));
    else if (name === "ordered_list") this.enter(h("ol", { start: attribute("start") }));
    else if (name === "table") {
      const table = h("table");
      this.enter(h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table), table);
    } else if (name === "th" || name === "td") {
      const align = /text-align:(\w+)/.exec(attribute("style") ?? "")?.[1];
      this.enter(h(name, { class: align ? `align-${align}` : null, scope: name === "th" ? "col" : null }));
    } else if (name === "link") this.enter(safeLink(attribute("href") ?? ""));
    else if (name === "footnote_block") {
      const list = h("ol");
      this.enter(h("section", { class: "footnotes", "aria-label": "Footnotes" }, list), list);
    } else if (name === "footnote") this.enter(h("li", { id: this.note(token), tabindex: "-1" }));
    else this.enter(h(TAGS[name] ?? "span"));
  }

  single(name, token, tokens, at) {
    const last = this.open && at === tokens.length - 1;
    if (name === "inline") this.inline(token, tokens[at - 2]?.type === "list_item_open");
    else if (name === "text" || name === "text_special") this.add(token.content);
    else if (name === "softbreak" || name === "hardbreak") this.add(h("br"));
    else if (name === "code_inline") this.add(h("code", {}, token.content));
    else if (name === "hr") this.add(h("hr"));
    else if (name === "fence" || name === "code_block") this.add(codeBlock(token.content.replace(/\n$/, ""), token.info, last));
    else if (name === "math_inline") this.add(formula(token.content, false));
    else if (name === "math_display") this.add(formula(token.content, true));
    else if (name === "image") this.add(safeLink(token.attrGet("src") ?? "", token.content || token.attrGet("src")));
    else if (name === "footnote_ref") this.reference(token);
    else if (name === "footnote_anchor") {
      this.add(" ");
      this.add(jump(this.noteReference(token), { role: "doc-backlink", "aria-label": "Back to the text" }, "↩︎"));
    } else this.add(token.content);
  }

  inline(token, beginsItem) {
    const task = beginsItem && token.children[0]?.type === "text" ? TASK.exec(token.children[0].content) : null;
    if (task) {
      const done = task[1] !== " ";
      this.places.findLast((place) => place.tagName === "LI").classList.add("task");
      this.add(h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "Done" : "Not done" }));
      token.children[0].content = token.children[0].content.slice(task[0].length - 1);
    }
    this.tokens(token.children);
  }

  note(token) { return `${this.prefix}-note-${token.meta.id + 1}`; }

  noteReference(token) { return `${this.prefix}-reference-${token.meta.id + 1}-${token.meta.subId ?? 0}`; }

  reference(token) {
    const number = String(token.meta.id + 1);
    this.add(h("sup", {}, jump(this.note(token),
      { id: this.noteReference(token), role: "doc-noteref", "aria-label": `Footnote ${number}` }, number)));
  }
}

/**
 * Elements of tokens.
 * @param {any[]} tokens of markdown-it
 * @param {string} prefix of ids, different for each answer
 * @param {boolean} open whether the last block is still being written
 * @returns {ChildNode[]}
 */
export const elementsOf = (tokens, prefix, open) => [...new Builder(prefix, open).tokens(tokens).root.childNodes];
