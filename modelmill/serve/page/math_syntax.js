// Math in Markdown, as a plugin of markdown-it: $a$, $$a$$, \(a\) and \[a\]. It makes tokens; math.js draws them.

const MAX_LINES = 500; // of a formula

/** @type {[string, string, boolean][]} begin, end, on a line of its own */
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false]];

/** Whether the character at this place is escaped by an odd number of backslashes. */
function escaped(text, at) {
  let count = 0;
  while (text[at - 1 - count] === "\\") count++;
  return count % 2 === 1;
}

/** Place of the mark that ends the math, or -1. */
function end(text, mark, from) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + 1)) {
    if (!escaped(text, at)) return at;
  }
  return -1;
}

const unclosed = new WeakMap(); // of a paragraph's parser: marks that do not come any more, from where on

/** The same in a paragraph, which is searched once for a mark that it does not have. */
function endInline(state, text, mark, from) {
  const known = unclosed.get(state) ?? new Map();
  const key = `${mark}${state.posMax}`; // a link's text is parsed as a shorter one
  if (from >= (known.get(key) ?? Infinity)) return -1;
  const at = end(text, mark, from);
  if (at < 0) unclosed.set(state, known.set(key, from));
  return at;
}

/** $a$: no blanks inside at the marks, no digit behind, so that "$5 and $10" stays text. */
function endOfDollar(text, from) {
  if (!text[from] || /[\s$]/.test(text[from])) return -1;
  const at = end(text, "$", from);
  return at < 0 || /\s/.test(text[at - 1]) || /\d/.test(text[at + 1] ?? "") ? -1 : at;
}

function push(state, content, display, markup) {
  const token = state.push(display ? "math_display" : "math_inline", "", 0);
  token.content = content;
  token.markup = markup;
}

function inline(state, silent) {
  const text = state.src.slice(0, state.posMax);
  if (text[state.pos] !== "$" && text[state.pos] !== "\\") return false;
  for (const [open, close, display] of PAIRS) {
    if (!text.startsWith(open, state.pos)) continue;
    const from = state.pos + open.length;
    const at = endInline(state, text, close, from);
    if (at < 0 || !text.slice(from, at).trim()) return false;
    if (!silent) push(state, text.slice(from, at), display, open);
    state.pos = at + close.length;
    return true;
  }
  if (text[state.pos] !== "$") return false;
  const at = endOfDollar(text, state.pos + 1);
  if (at < 0) return false;
  if (!silent) push(state, text.slice(state.pos + 1, at), false, "$");
  state.pos = at + 1;
  return true;
}

/** A formula that has its lines for itself. */
function block(state, first, last, silent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
  const pair = PAIRS.find(([open, , display]) => display && line(first).startsWith(open));
  if (!pair) return false;
  const [open, close] = pair;
  const lines = [];
  for (let number = first; number < Math.min(last, first + MAX_LINES); number++) {
    const text = number === first ? line(number).slice(open.length) : line(number);
    const at = end(text, close, 0);
    if (at < 0) { lines.push(text); continue; }
    if (text.slice(at + close.length).trim()) return false; // more text follows: a formula of a paragraph
    lines.push(text.slice(0, at));
    if (!lines.join("").trim()) return false;
    if (silent) return true;
    state.line = number + 1;
    push(state, lines.join("\n"), true, open);
    state.tokens.at(-1).map = [first, number + 1];
    return true;
  }
  return false;
}

/**
 * Add math to a parser.
 * @param {any} parser of markdown-it
 */
export function math(parser) {
  parser.inline.ruler.before("escape", "math", inline);
  parser.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}
