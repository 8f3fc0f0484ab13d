/** Runs work at most once per animation frame. */

const LONGEST_WAIT_MS = 250;

/**
 * Runs work at the next animation frame, or after a timeout if the page is hidden and has no frames.
 *
 * @param {() => void} work
 */
export function nextFrame(work) {
  let isDone = false;
  const once = () => {
    if (isDone) return;
    isDone = true;
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    work();
  };
  const frame = requestAnimationFrame(once);
  const timer = setTimeout(once, LONGEST_WAIT_MS);
}

/**
 * Returns a function that schedules `render`; several calls before the next frame render once.
 *
 * @param {() => void} render
 * @returns {() => void}
 */
export function oncePerFrame(render) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    nextFrame(() => {
      isAsked = false;
      render();
    });
  };
}
