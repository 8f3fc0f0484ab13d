/** Bars: how often the draft token in each place of the block was accepted. */

import { element, fillMeter, format } from "./page.js";

/** @param {import("./tally.js").Tally} tally */
export function drawChart(tally) {
  const chart = element("chart");
  const { judged, accepted } = tally;
  while (chart.children.length > judged.length) chart.lastElementChild?.remove();
  while (chart.children.length < judged.length) chart.append(makeColumn(chart.children.length + 1));
  judged.forEach((count, place) => fillColumn(/** @type {HTMLElement} */ (chart.children[place]), accepted[place], count));
  element("chart_note").textContent =
    judged.length === 0 ? "Nothing was drafted yet." : "Rounds that accepted the token in this place, of those that judged one.";
}

/**
 * @param {number} place From 1.
 * @returns {HTMLElement}
 */
function makeColumn(place) {
  const column = document.createElement("li");
  for (const name of ["percent", "bar", "place", "counts"]) {
    const part = document.createElement("span");
    part.className = name;
    column.append(part);
  }
  column.children[2].textContent = String(place);
  return column;
}

/**
 * @param {HTMLElement} column
 * @param {number} accepted
 * @param {number} judged
 */
function fillColumn(column, accepted, judged) {
  const [percent, bar, , counts] = /** @type {HTMLElement[]} */ ([...column.children]);
  percent.textContent = `${format((100 * accepted) / judged, 0)} %`;
  counts.textContent = `${accepted}/${judged}`;
  column.dataset.accepted = String(accepted);
  column.dataset.judged = String(judged);
  fillMeter(bar, accepted / judged);
}
