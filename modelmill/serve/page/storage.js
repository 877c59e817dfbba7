// Small values that the page keeps: settings permanently, the API key, the open conversation and the unsent message until the tab is closed.

const UNTIL_CLOSED = new Set(["key", "open", "draft"]);

const shelf = (name) => (UNTIL_CLOSED.has(name) ? sessionStorage : localStorage);

/**
 * @param {string} name
 * @returns {any} null if there is none, or the storage is disabled
 */
export function kept(name) {
  try { return JSON.parse(shelf(name).getItem(`modelmill.${name}`) ?? "null"); } catch { return null; }
}

/**
 * @param {string} name
 * @param {any} value
 * @returns {boolean} false: the storage is full or disabled
 */
export function keep(name, value) {
  try {
    shelf(name).setItem(`modelmill.${name}`, JSON.stringify(value));
    return true;
  } catch { return false; }
}
