// Where the nodes of a tree are drawn: rows in the order of arrival or branch by branch, and lanes beside each other.
//
// A call and the observation that only it was fed share a row. Each row goes on in the lane of the row above it when
// it is its heir; any other row opens a lane, which is free again after the last row of its line.

function makeRows(model) {
  const rows = [];
  const rowOf = new Map();
  for (const node of model.nodes.slice(1)) {
    const next = node.children.length === 1 ? model.nodes[node.children[0]] : null;
    if (!node.sampled && next?.sampled) continue;
    const above = model.nodes[node.parent];
    const shared = node.sampled && !above.sampled && above.id !== 0 && above.children.length === 1;
    const nodes = shared ? [above, node] : [node];
    const row = { nodes, node, parent: rowOf.get(model.nodes[nodes[0].parent]) ?? null, children: [], heir: null };
    for (const member of nodes) rowOf.set(member, row);
    row.parent?.children.push(row);
    rows.push(row);
  }
  for (const row of rows) row.heir = heirOf(row);
  return { rows, rowOf };
}

/** The child that goes on in the lane: one that is trained, of the same kind, with the most that goes on from it. */
function heirOf(row) {
  const rank = ({ node }) => [
    node.trainedBelow ? 1 : 0,
    node.kind === row.node.kind ? 1 : 0,
    node.trainedBelow,
    node.callsBelow,
  ];
  return row.children.reduce((best, child) => (best && !isAbove(rank(child), rank(best)) ? best : child), null);
}

function isAbove(one, other) {
  const at = one.findIndex((value, index) => value !== other[index]);
  return at >= 0 && one[at] > other[at];
}

/** Rows with `index`, `lane` and `head` (whether they open their lane); `order` is "arrival" or "branch". */
function layOut(model, order) {
  const { rows, rowOf } = makeRows(model);
  const ordered = order === "branch" ? branchByBranch(rows) : rows;
  ordered.forEach((row, index) => (row.index = index));
  const lines = ordered.filter((row) => row.parent?.heir !== row).map(lineFrom);
  const ends = [];
  lines.sort((one, other) => one.start - other.start || one.rows[0].index - other.rows[0].index);
  for (const line of lines) {
    let lane = ends.findIndex((end) => end < line.start);
    if (lane < 0) lane = ends.length;
    ends[lane] = line.end;
    for (const row of line.rows) Object.assign(row, { lane, head: row === line.rows[0] });
  }
  return { rows: ordered, rowOf, lanes: ends.length };
}

function lineFrom(head) {
  const rows = [];
  for (let row = head; row; row = row.heir) rows.push(row);
  const start = head.parent ? head.parent.index + 1 : head.index;
  return { rows, start, end: rows[rows.length - 1].index };
}

/** Depth first; the heir comes last, so that a line goes on below what left it. */
function branchByBranch(rows) {
  const ordered = [];
  const open = rows.filter((row) => !row.parent).reverse();
  while (open.length) {
    const row = open.pop();
    ordered.push(row);
    if (row.heir) open.push(row.heir);
    open.push(...row.children.filter((child) => child !== row.heir).reverse());
  }
  return ordered;
}
