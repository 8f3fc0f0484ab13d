/** Strip of the latest rounds: how long each draft was, and how much of it was accepted. */

import { element } from "./page.js";

/** @param {import("./tally.js").Tally} tally */
export function drawStrip(tally) {
  const strip = element("strip");
  const { latest } = tally;
  const longest = Math.max(1, ...latest.map((round) => round.drafted));
  while (strip.children.length > latest.length) strip.lastElementChild?.remove();
  while (strip.children.length < latest.length) strip.append(document.createElement("i"));
  latest.forEach(({ drafted, accepted }, index) => {
    const bar = /** @type {HTMLElement} */ (strip.children[index]);
    bar.style.setProperty("--drafted", String(drafted / longest));
    bar.style.setProperty("--kept", String(drafted ? accepted / drafted : 0));
    bar.dataset.drafted = String(drafted);
    bar.dataset.accepted = String(accepted);
  });
  strip.setAttribute("aria-label", `Draft tokens of the last ${latest.length} rounds, at most ${longest} in a round`);
  element("strip_part").hidden = latest.length === 0;
}
