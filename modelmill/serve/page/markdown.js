// Shows Markdown. A growing text costs its last block only: the blocks before it are finished and stay as they are.
import MarkdownIt from "./vendor/markdown-it.min.js";
import "./vendor/markdown-it-footnote.min.js";
import { elementsOf, isWebLink } from "./markdown_elements.js";
import { math } from "./math_syntax.js";

const MAX_NESTING = 60;
const HAS_DEFINITIONS = /^ {0,3}\[[^\]\n]+\]:|\^\[/m; // of footnotes and links: they change blocks before them

function makeParser() {
  const parser = new /** @type {any} */ (MarkdownIt)({ html: false, linkify: true, breaks: true, maxNesting: MAX_NESTING });
  parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
  parser.validateLink = isWebLink;
  return parser.use(math);
}

const growing = makeParser();
const whole = makeParser().use(/** @type {any} */ (globalThis).markdownitFootnote);

let views = 0;

/** Offset of a line in a text. */
function offsetOf(text, line) {
  let at = 0;
  for (let count = 0; count < line; count++) at = text.indexOf("\n", at) + 1;
  return at;
}

export class View {
  /**
   * @param {HTMLElement} root which holds nothing else
   * @param {(text: string) => void} finished is called with each block that is finished while the text grows
   */
  constructor(root, finished = () => {}) {
    this.root = root;
    this.finished = finished;
    this.prefix = `answer-${++views}`;
    this.#reset();
  }

  #reset() {
    this.settled = ""; // text whose elements stay
    this.tail = []; // elements of the rest
    this.openCode = null; // {info} if the tail is one block of code
    this.root.replaceChildren();
  }

  /**
   * Show the whole text.
   * @param {string} text
   * @param {boolean} grows whether more will follow
   */
  show(text, grows = false) {
    const clean = text.replace(/\r\n?/g, "\n");
    const definitions = !grows && HAS_DEFINITIONS.test(clean);
    if (definitions || !clean.startsWith(this.settled)) this.#reset();
    const rest = clean.slice(this.settled.length);
    const tokens = (definitions ? whole : growing).parse(rest, {});
    if (grows) this.#extend(rest, tokens);
    else this.#end(tokens);
  }

  /** What has not been announced: the text of the last block. */
  get rest() { return this.tail.map((node) => node.textContent).join("\n"); }

  #end(tokens) {
    this.#replaceTail(elementsOf(tokens, this.prefix, false));
    this.openCode = null;
  }

  #extend(rest, tokens) {
    const starts = tokens.flatMap((token, at) => (token.level === 0 && token.nesting >= 0 && token.map ? [at] : []));
    const last = starts.at(-1) ?? 0;
    if (last > 0) {
      const done = elementsOf(tokens.slice(0, last), this.prefix, false);
      this.#replaceTail(done);
      this.tail = [];
      this.openCode = null;
      this.settled += rest.slice(0, offsetOf(rest, tokens[last].map[0]));
      for (const node of done) this.finished(node.textContent);
    }
    const code = tokens[last]?.type === "fence" ? tokens[last] : null;
    if (code && this.openCode?.info === code.info) {
      this.openCode.element.extend(code.content.replace(/\n$/, ""));
      return;
    }
    this.#replaceTail(elementsOf(tokens.slice(last), this.prefix, true));
    this.openCode = code && { info: code.info, element: this.tail[0] };
  }

  #replaceTail(nodes) {
    for (const node of this.tail) node.remove();
    this.root.append(...nodes);
    this.tail = nodes;
  }
}
