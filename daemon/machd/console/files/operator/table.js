// Tables of all views: columns with units and numbers to the right; on a narrow page a row becomes a card.

import { html } from "/console/vendor/htm-preact.js";

/**
 * @param {object} props
 * @param {string} props.label Names the table for those who cannot see it.
 * @param {{name: string, label: string, isNumber?: boolean, show: (row: object) => unknown, value?: (row: object) => unknown}[]}
 *   props.columns `value` is what rows are sorted by.
 * @param {object[]} props.rows In order.
 * @param {(row: object) => string} props.keyOf
 * @param {string} props.empty What is said without rows.
 * @param {{name: string, isDown: boolean}} [props.sort] Column that `rows` are sorted by.
 * @param {(name: string) => void} [props.onSort]
 */
export function Table({ label, columns, rows, keyOf, empty, sort, onSort }) {
  return html`
    <div class="scrolled" role="region" aria-label=${label} tabindex="0">
      <table role="table">
        <caption class="only-read">${label}</caption>
        <thead role="rowgroup">
          <tr role="row">
            ${columns.map((one) => html`<${Heading} key=${one.name} column=${one} sort=${sort} onSort=${onSort} />`)}
          </tr>
        </thead>
        <tbody role="rowgroup">
          ${rows.map(
            (row) => html`
              <tr role="row" key=${keyOf(row)}>
                ${columns.map(
                  (one) => html`
                    <td key=${one.name} role="cell" class=${classOf(one)} data-label=${one.label}>${one.show(row)}</td>
                  `,
                )}
              </tr>
            `,
          )}
          ${rows.length === 0 &&
          html`<tr role="row" class="empty"><td role="cell" colspan=${columns.length} class="muted">${empty}</td></tr>`}
        </tbody>
      </table>
    </div>
  `;
}

function Heading({ column, sort, onSort }) {
  const { name, label, value } = column;
  if (onSort === undefined || value === undefined) {
    const shown = label || html`<span class="only-read">Actions</span>`;
    return html`<th scope="col" role="columnheader" class=${classOf(column)}>${shown}</th>`;
  }
  const isSorted = sort.name === name;
  const order = isSorted ? (sort.isDown ? "descending" : "ascending") : "none";
  return html`
    <th scope="col" role="columnheader" class=${classOf(column)} aria-sort=${order}>
      <button type="button" class="plain" onClick=${() => onSort(name)}>
        ${label}<span aria-hidden="true" class="order">${isSorted ? (sort.isDown ? "▼" : "▲") : ""}</span>
      </button>
    </th>
  `;
}

/** Sort rows by a column; what has no value is last. */
export function sorted(rows, columns, { name, isDown }) {
  const { value } = columns.find((one) => one.name === name);
  const sign = isDown ? -1 : 1;
  return [...rows].sort((left, right) => {
    const [a, b] = [value(left), value(right)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return a < b ? -sign : sign;
  });
}

function classOf({ name, isNumber }) {
  return isNumber ? `number of-${name}` : `of-${name}`;
}
