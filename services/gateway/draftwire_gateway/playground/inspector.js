/** Details of one token. */

import { element, fillMeter } from "./page.js";

/** @typedef {import("./tokens.js").PlacedToken} PlacedToken */

/** @param {PlacedToken | null} token */
export function inspect(token) {
  element("inspector").classList.toggle("blank", token === null);
  element("token_text").textContent = token ? JSON.stringify(token.text) : "";
  element("token_id").textContent = token ? String(token.id) : "";
  element("token_source").textContent = token ? token.source : "";
  element("token_source").className = token ? `token ${token.source}` : "";
  element("token_place").textContent = token ? placeOf(token) : "";
  showProbability("draft", token?.draft_logprob);
  showProbability("target", token?.logprob);
}

/**
 * @param {PlacedToken} token
 * @returns {string}
 */
function placeOf(token) {
  const round = `round ${token.round}`;
  if (token.source === "plain") return round;
  const block = `block of ${token.numDraftTokens}`;
  return token.source === "bonus" ? `${round}, after a ${block}` : `${round}, ${token.place} in a ${block}`;
}

/**
 * @param {"draft" | "target"} whose
 * @param {number | null | undefined} logprob
 */
function showProbability(whose, logprob) {
  const isKnown = typeof logprob === "number";
  const probability = isKnown ? Math.exp(logprob) : 0;
  element(`${whose}_probability`).textContent = isKnown ? formatProbability(probability) : "–";
  fillMeter(element(`${whose}_meter`), probability);
}

/**
 * @param {number} probability
 * @returns {string}
 */
function formatProbability(probability) {
  return probability > 0 && probability < 0.0005 ? "< 0.001" : probability.toFixed(3);
}
