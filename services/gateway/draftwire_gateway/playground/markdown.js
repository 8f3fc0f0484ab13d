/** Text that a model wrote, as elements: code blocks, lists, headings, bold and code. Nothing in it becomes markup. */

const ITEM = /^\s*(?:[-*+]|\d+[.)])\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*/g;

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function asElements(text) {
  const fragment = document.createDocumentFragment();
  text.split(/^```.*$/m).forEach((part, index) => {
    if (index % 2 === 1) fragment.append(make("pre", make("code", part.replace(/^\n|\n$/g, ""))));
    else for (const block of part.split(/\n\s*\n/)) if (block.trim()) fragment.append(...blockElements(block));
  });
  return fragment;
}

/**
 * @param {string} block Lines without an empty one.
 * @returns {HTMLElement[]}
 */
function blockElements(block) {
  /** @type {HTMLElement[]} */
  const made = [];
  for (const line of block.trim().split("\n")) {
    const item = ITEM.exec(line);
    const last = made.at(-1);
    const kind = /^\s*\d/.test(line) ? "OL" : "UL";
    if (item && last?.tagName === kind) last.append(make("li", ...inline(item[1])));
    else if (item) made.push(make(kind, make("li", ...inline(item[1]))));
    else if (HEADING.test(line)) made.push(make("p", make("strong", ...inline(line.replace(HEADING, "$1")))));
    else if (last?.tagName === "P") last.append("\n", ...inline(line));
    else made.push(make("p", ...inline(line)));
  }
  return made;
}

/**
 * @param {string} line
 * @returns {(Node | string)[]}
 */
function inline(line) {
  /** @type {(Node | string)[]} */
  const made = [];
  let end = 0;
  for (const found of line.matchAll(INLINE)) {
    made.push(line.slice(end, found.index), found[1] ? make("code", found[1]) : make("strong", found[2]));
    end = found.index + found[0].length;
  }
  return [...made, line.slice(end)];
}

/**
 * @param {string} name
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
function make(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
