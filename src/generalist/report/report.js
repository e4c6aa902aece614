"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = () => root.dataset.theme || (dark.matches ? "dark" : "light");

  // The theme: that of the system until somebody chooses another.
  const theme = document.getElementById("theme");
  const nameTheme = () => { theme.textContent = shown() === "dark" ? "Light theme" : "Dark theme"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = shown() === "dark" ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // Sorting: numbers as numbers, the rest as text; rows without a value stay at the end.
  const value = (row, column) => {
    const cell = row.cells[column];
    return (cell.dataset.value ?? cell.textContent).trim();
  };
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  const sort = (table, column) => {
    const heads = [...table.tHead.rows[0].cells];
    // The first click on figures brings the largest to the top, on names the first.
    const figures = [...table.tBodies[0].rows].every((row) => !Number.isNaN(Number(value(row, column))));
    const first = figures && column > 0 ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = heads[column].ariaSort === first ? other : first;
    heads.forEach((head, i) => { head.ariaSort = i === column ? order : "none"; });
    const sign = order === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a, column), y = value(b, column);
      if (x === "" || y === "") return (x === "") - (y === "");
      return sign * compare(x, y);
    });
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => sort(table, column));
    });
  }

  // Methods: what is unchecked is hidden, in figures, tables and cards alike.
  const boxes = [...document.querySelectorAll("input[data-filter]")];
  const marked = [...document.querySelectorAll("[data-method]")];
  const filter = () => {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.dataset.filter));
    for (const element of marked) {
      if (hidden.has(element.dataset.method)) element.setAttribute("hidden", "");
      else element.removeAttribute("hidden");
    }
  };
  boxes.forEach((box) => box.addEventListener("change", filter));
  filter(); // a browser may keep what was unchecked before a reload

  // What a figure says of a point, beside the pointer; the tables say the same without one.
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = target === null;
    if (target === null) return;
    tip.textContent = target.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const below = event.clientY + 16;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 12 : below}px`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show); // a finger does not hover
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
