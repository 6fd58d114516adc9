// Elements, made and found. Text is always set as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Facts: {key, label, value, text, note}. A value of null is none.
export function factTiles(facts) {
  return facts.map((fact) =>
    element("div", { class: "fact", "data-fact": fact.key, "data-value": fact.value ?? "" },
      element("dt", {}, fact.label), element("dd", { class: "value" }, fact.text), element("dd", { class: "note" }, fact.note)));
}

// Rows of texts under headings.
export function table(headings, rows, caption) {
  return element("div", { class: "scroll" },
    element("table", {},
      element("caption", { class: "quiet" }, caption),
      element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", { "data-row": row[0] },
        ...row.map((text) => element("td", {}, text)))))));
}
