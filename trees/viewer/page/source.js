// Where rows and trees come from: the server that sent this page, or what is embedded in it.

const embedded = document.getElementById("rows");

/** Calls `take(rows, about)` for each portion of the list, as they come. */
async function readRows(take) {
  if (embedded) {
    const { rows, about } = JSON.parse(embedded.textContent);
    take(rows, { ...about, total: rows.length, without_tree: 0 });
    return;
  }
  for (let from = 0; from !== null;) {
    const portion = await ask(`episodes?from=${from}`);
    take(portion.rows, portion.about);
    from = portion.next;
  }
}

const opened = new Map();

/** The tree of an episode; an Error says why it cannot be shown. The newest few are kept. */
async function readTree(name, rows) {
  if (!opened.has(name)) {
    const tree = embedded ? await unpack(name, rows) : await ask(`tree?episode=${encodeURIComponent(name)}`);
    if (tree.error) throw new Error(tree.error);
    opened.set(name, new TreeModel(tree));
    if (opened.size > 8) opened.delete(opened.keys().next().value);
  }
  return opened.get(name);
}

async function ask(path) {
  const response = await fetch(path).catch(() => null);
  if (!response) throw new Error("The server does not answer. Is python -m trees.view still running?");
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function unpack(name, rows) {
  const block = document.getElementById(`tree-${rows.findIndex((row) => row.episode === name)}`);
  if (!block) return { error: `Episode ${name} is not in this file.` };
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
