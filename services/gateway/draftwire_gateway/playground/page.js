/** Small helpers for the elements of the page. */

/**
 * @param {string} id
 * @returns {HTMLElement}
 * @throws {Error} There is no such element.
 */
export function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * @param {string} id
 * @returns {HTMLInputElement}
 */
export function input(id) {
  return /** @type {HTMLInputElement} */ (element(id));
}

/**
 * @param {HTMLElement} meter
 * @param {number} share From 0 to 1; NaN counts as 0.
 */
export function fillMeter(meter, share) {
  meter.style.setProperty("--share", String(Math.min(1, share) || 0));
}

/**
 * @param {number} value
 * @param {number} digits Decimal places.
 * @returns {string} A dash for NaN.
 */
export function format(value, digits) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
