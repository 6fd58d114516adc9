// Light, dark, or as the system says. The choice stays in this browser.

const KEY = "denim-theme";
const ORDER = ["auto", "light", "dark"];

export function startTheme(button, changed) {
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[theme];
    button.setAttribute("aria-label", `colours: ${theme}`);
  };
  let theme = ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    localStorage.setItem(KEY, theme);
    show(theme);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

// A colour of the style sheet as a canvas takes it.
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
