// A tree as the page works with it: nodes with children, texts of tokens, and figures along the paths.

const KINDS = ["main", "subagent", "compaction", "after-compaction", "side"];

class TreeModel {
  constructor(data) {
    Object.assign(this, {
      name: data.episode,
      meta: data.meta,
      counts: data.counts,
      liveLeaves: data.live_leaves,
      nodes: data.nodes,
    });
    this.words = data.words;
    this.marks = new Set(data.marks ?? []);
    for (const node of this.nodes) node.children = [];
    for (const node of this.nodes.slice(1)) this.nodes[node.parent].children.push(node.id);
    this.#measure();
  }

  /** Tokens before each node, and how much hangs below it. */
  #measure() {
    for (const node of this.nodes) {
      node.before = node.parent < 0 ? 0 : this.nodes[node.parent].before + this.nodes[node.parent].ids.length;
      node.callsBelow = node.sampled ? 1 : 0;
      node.trainedBelow = node.trained ? 1 : 0;
    }
    for (const node of this.nodes.slice(1).reverse()) {
      const parent = this.nodes[node.parent];
      parent.callsBelow = Math.max(parent.callsBelow, node.callsBelow + (parent.sampled ? 1 : 0));
      parent.trainedBelow += node.trainedBelow;
    }
    this.longest = this.nodes.reduce((most, node) => Math.max(most, node.before + node.ids.length), 1);
  }

  path(id) {
    const nodes = [];
    for (let at = id; at >= 0; at = this.nodes[at].parent) nodes.push(this.nodes[at]);
    return nodes.reverse();
  }

  isMark(token) {
    return this.marks.has(token);
  }

  /** One text for each of the first `limit` tokens; those that only complete a character have "". */
  texts(node, limit = Infinity) {
    const ids = limit < node.ids.length ? node.ids.slice(0, limit) : node.ids;
    if (!this.words) return ids.map((id, index) => (index ? ` ${id}` : `${id}`));
    const texts = ids.map((id) => this.words[id]);
    for (const [start, length, text] of node.groups) {
      if (start >= texts.length) break;
      texts.fill("", start, start + length);
      texts[start] = text;
    }
    return texts;
  }

  /** The version that sampled a token, or null. */
  versionAt(node, index) {
    const span = node.versions.find(([, start, end]) => start <= index && index < end);
    return span ? span[0] : null;
  }
}

/** What became of a node's tokens, in the words of the legend. */
function state(node) {
  if (!node.sampled) return "observed";
  return node.trained ? "trained" : node.reason || "not trained";
}
