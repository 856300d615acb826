/** Tables whose columns sort and whose rows can be filtered by name. */

/** Make the buttons in a table's headings sort it: numbers in descending, names in ascending order. */
export function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      const descending = before === "none" ? column > 0 : before === "ascending";
      for (const one of headings) one.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (row) => Number(row.cells[column].dataset.value);
      const sign = descending ? -1 : 1;
      body.append(...[...body.rows].sort((a, b) => sign * (value(a) - value(b))));
    });
  });
}

/** Show only the rows of a table whose name contains the text of `input`, and how many there are. */
export function makeFilterable(table, input, count, what = "units") {
  const filter = () => {
    const wanted = input.value.trim().toLowerCase();
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.dataset.name.toLowerCase().includes(wanted);
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown === rows.length ? `${rows.length} ${what}` : `${shown} of ${rows.length} ${what}`;
  };
  input.addEventListener("input", filter);
  filter();
}
