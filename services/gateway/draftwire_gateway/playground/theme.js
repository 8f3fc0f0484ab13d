/** Colour theme: light, dark, or the system's. */

const KEY = "draftwire.theme";

/** @param {HTMLSelectElement} select */
export function followTheme(select) {
  select.value = remembered();
  apply(select.value);
  select.addEventListener("change", () => {
    apply(select.value);
    try {
      localStorage.setItem(KEY, select.value);
    } catch {
      // Without storage the theme still applies to this page.
    }
  });
}

/** @param {string} theme Empty: the system's. */
function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/** @returns {string} */
function remembered() {
  try {
    const theme = localStorage.getItem(KEY) ?? "";
    return ["light", "dark"].includes(theme) ? theme : "";
  } catch {
    return "";
  }
}
