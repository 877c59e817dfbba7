// Creates elements; text is always set as text, so no part of an answer is parsed as HTML.
export const $ = (id) => document.getElementById(id);

export function h(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// A copy button confirms for a moment, by its icon and its accessible name.
export function copied(button) {
  const name = button.getAttribute("aria-label");
  if (button.textContent === "Copied") return;
  button.textContent = "Copied";
  button.removeAttribute("aria-label");
  setTimeout(() => { button.textContent = "Copy"; button.setAttribute("aria-label", name); }, 1500);
}

export const say = (text) => { $("voice").textContent = text; };

export function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble-text").textContent = text || "";
}

$("trouble-close").addEventListener("click", () => trouble(""));

export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
