/** Bar chart of the acceptance rate by position in the draft block. */

import { element, fillMeter, format } from "./page.js";

/** @param {import("./tally.js").Tally} tally */
export function drawChart(tally) {
  const chart = element("chart");
  const { judged, accepted } = tally;
  while (chart.children.length > judged.length) chart.lastElementChild?.remove();
  while (chart.children.length < judged.length) chart.append(makeRow(chart.children.length + 1));
  judged.forEach((count, place) => fillRow(/** @type {HTMLElement} */ (chart.children[place]), accepted[place], count));
  element("chart_note").textContent =
    judged.length === 0 ? "Nothing was drafted yet." : "Rounds that accepted the token in this place, of those that judged one.";
}

/**
 * @param {number} place From 1.
 * @returns {HTMLElement}
 */
function makeRow(place) {
  const row = document.createElement("li");
  for (const name of ["place", "meter", "percent", "counts"]) {
    const part = document.createElement("span");
    part.className = name;
    row.append(part);
  }
  row.children[0].textContent = String(place);
  return row;
}

/**
 * @param {HTMLElement} row
 * @param {number} accepted
 * @param {number} judged
 */
function fillRow(row, accepted, judged) {
  const [, meter, percent, counts] = /** @type {HTMLElement[]} */ ([...row.children]);
  percent.textContent = `${format((100 * accepted) / judged, 0)} %`;
  counts.textContent = `${accepted}/${judged}`;
  row.dataset.accepted = String(accepted);
  row.dataset.judged = String(judged);
  fillMeter(meter, accepted / judged);
}
