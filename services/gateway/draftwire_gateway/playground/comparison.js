/** Comparison of a speculative run with a plain one of the same prompt. */

import { element, fillMeter, format } from "./page.js";

/**
 * @typedef {import("./tally.js").Tally} Tally
 * @typedef {{tally: Tally, text: string}} Outcome
 */

/** Clears the last comparison. */
export function clearComparison() {
  element("comparison").hidden = true;
}

/**
 * @param {Outcome} speculative
 * @param {Outcome} plain
 * @param {boolean} mustBeEqual Whether the texts must be equal: greedy decoding, or the coupled rule.
 */
export function compare(speculative, plain, mustBeEqual) {
  const [fast, slow] = [speculative.tally.tokensPerSecond, plain.tally.tokensPerSecond];
  const best = Math.max(fast, slow);
  element("ratio").textContent = `${format(fast / slow, 2)}×`;
  fillMeter(element("speculative_meter"), fast / best);
  fillMeter(element("plain_meter"), slow / best);
  element("speculative_speed").textContent = `${format(fast, 1)} tokens/s`;
  element("plain_speed").textContent = `${format(slow, 1)} tokens/s`;
  element("equality").textContent = mustBeEqual
    ? equality(speculative.text, plain.text)
    : "Two draws from the same law: the texts need not be equal. At temperature 0, and under coupled, they are.";
  element("comparison").hidden = false;
}

/**
 * @param {string} one
 * @param {string} other
 * @returns {string}
 */
function equality(one, other) {
  if (one === other) return "The texts are equal, character by character.";
  let same = 0;
  while (same < one.length && one[same] === other[same]) same += 1;
  return `The texts part after ${same} characters. A near-tie does that: two tokens as likely as each other up to rounding.`;
}
