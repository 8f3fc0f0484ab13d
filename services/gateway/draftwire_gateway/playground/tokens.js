/** A text with its tokens marked by source. */

import { nextFrame } from "./frames.js";

/**
 * @typedef {import("./api.js").Token} Token
 * @typedef {import("./tally.js").Round} Round
 * @typedef {Token & {round: number, place: number, numDraftTokens: number}} PlacedToken
 *   `round` and `place` (of the token in its round) count from 1.
 */

const ROUNDS_PER_FRAME = 150;
const BOTTOM_PX = 8;

export class TokenText {
  /** @type {PlacedToken[]} */
  #tokens = [];
  /** @type {HTMLElement[]} */
  #spans = [];
  /** @type {Round[]} */
  #waiting = [];
  #numRounds = 0;
  /** The token that has, or had, the focus. @type {number | null} */
  #current = null;
  /** @type {(() => void)[]} */
  #onDrained = [];

  /**
   * @param {HTMLElement} root Shows nothing else.
   * @param {(token: PlacedToken | null) => void} onInspect Called with the inspected token.
   */
  constructor(root, onInspect) {
    this.root = root;
    this.onInspect = onInspect;
    root.addEventListener("pointerover", (event) => this.#inspect(this.#indexOf(event.target) ?? this.#current));
    root.addEventListener("pointerleave", () => this.#inspect(this.#current));
    root.addEventListener("focusin", (event) => this.#inspect(this.#indexOf(event.target)));
    root.addEventListener("click", (event) => this.#moveTo(this.#indexOf(event.target)));
    root.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /**
   * Clears the text and shows a prompt.
   *
   * @param {string} prompt
   */
  begin(prompt) {
    this.#tokens = [];
    this.#spans = [];
    this.#waiting = [];
    this.#numRounds = 0;
    this.#current = null;
    const before = document.createElement("span");
    before.className = "prompt";
    before.textContent = prompt;
    this.root.replaceChildren(before, document.createElement("span"));
    this.onInspect(null);
  }

  /**
   * Adds a round, which is shown at the next frame.
   *
   * @param {Round} round
   */
  add(round) {
    this.#waiting.push(round);
    if (this.#waiting.length === 1) nextFrame(() => this.#append());
  }

  /**
   * Resolves when all added rounds are shown.
   *
   * @returns {Promise<void>}
   */
  drained() {
    if (this.#waiting.length === 0) return Promise.resolve();
    return new Promise((resolve) => this.#onDrained.push(resolve));
  }

  #append() {
    const root = this.root;
    const wasAtBottom = root.scrollHeight - root.scrollTop - root.clientHeight < BOTTOM_PX;
    const fragment = document.createDocumentFragment();
    for (const round of this.#waiting.splice(0, ROUNDS_PER_FRAME)) fragment.append(this.#makeRound(round));
    root.lastElementChild?.append(fragment);
    if (wasAtBottom) root.scrollTop = root.scrollHeight;
    if (this.#waiting.length > 0) return nextFrame(() => this.#append());
    for (const resolve of this.#onDrained.splice(0)) resolve();
  }

  /**
   * @param {Round} round
   * @returns {HTMLElement}
   */
  #makeRound(round) {
    this.#numRounds += 1;
    const span = document.createElement("span");
    span.className = "round";
    round.tokens.forEach((token, index) => {
      const placed = { ...token, round: this.#numRounds, place: index + 1, numDraftTokens: round.numDraftTokens };
      span.append(this.#makeToken(placed));
    });
    const shown = round.tokens.reduce((length, token) => length + token.text.length, 0);
    if (shown < round.text.length) span.append(round.text.slice(shown));
    return span;
  }

  /**
   * @param {PlacedToken} token
   * @returns {HTMLElement}
   */
  #makeToken(token) {
    const span = document.createElement("span");
    span.className = `token ${token.source}`;
    if (token.text === "") span.classList.add("empty");
    if (token.text.startsWith("\n")) span.classList.add("newline");
    span.textContent = token.text;
    span.dataset.index = String(this.#tokens.length);
    if (this.#tokens.length === 0) span.tabIndex = 0;
    this.#tokens.push(token);
    this.#spans.push(span);
    return span;
  }

  /**
   * @param {EventTarget | null} target
   * @returns {number | null}
   */
  #indexOf(target) {
    const span = target instanceof Element ? target.closest(".token") : null;
    return span instanceof HTMLElement ? Number(span.dataset.index) : null;
  }

  /** @param {number | null} index */
  #inspect(index) {
    this.onInspect(index === null ? null : this.#tokens[index]);
  }

  /** @param {number | null} index */
  #moveTo(index) {
    if (index === null) return;
    this.#spans[this.#current ?? 0].tabIndex = -1;
    this.#current = index;
    const span = this.#spans[index];
    span.tabIndex = 0;
    span.setAttribute("aria-describedby", "inspector");
    span.focus();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const index = this.#indexOf(event.target);
    if (index === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = this.#neighbour(index, event.key);
    if (next === null) return;
    event.preventDefault();
    this.#moveTo(next);
  }

  /**
   * @param {number} index
   * @param {string} key
   * @returns {number | null} Index of the token that the key moves to; null if it does not move.
   */
  #neighbour(index, key) {
    const last = this.#tokens.length - 1;
    const begin = this.#beginOfRound(index);
    switch (key) {
      case "ArrowLeft":
        return Math.max(0, index - 1);
      case "ArrowRight":
        return Math.min(last, index + 1);
      case "ArrowUp":
        return begin < index ? begin : this.#beginOfRound(Math.max(0, begin - 1));
      case "ArrowDown":
        return this.#beginOfNextRound(index) ?? last;
      case "Home":
        return 0;
      case "End":
        return last;
      default:
        return null;
    }
  }

  /** @param {number} index */
  #beginOfRound(index) {
    return index - this.#tokens[index].place + 1;
  }

  /** @param {number} index */
  #beginOfNextRound(index) {
    for (let next = index + 1; next < this.#tokens.length; next += 1) if (this.#tokens[next].place === 1) return next;
    return null;
  }
}
