/** Work that is done at most once per frame. */

const LONGEST_WAIT_MS = 250;

/**
 * Runs something at the next frame, or soon where there are no frames because the page is hidden.
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
 * Returns a function that asks for `render`; asking twice before the next frame renders once.
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
