// An opened episode: head, legend, tree and details, and the keys that move through them.

const KEYS = [
  ["↑ ↓", "along the branch"],
  ["← →", "to the branch beside it"],
  ["j k", "row by row"],
  ["t", "next tab"],
  ["o", "by arrival, by branch"],
  ["+ − 0", "larger, smaller, all in sight"],
  ["[ ]", "previous, next episode"],
  ["Esc", "to the list"],
];

class Opened {
  constructor(model, place) {
    Object.assign(this, { model, name: model.name, place });
    this.tree = new TreeView(model, (node) => this.go({ node: node.id }));
    this.details = new Details(
      (tab) => this.go({ tab }),
      (node) => this.go({ node: node.id }),
    );
    const legend = new Legend(model, (matches) => this.tree.spotlight(matches));
    this.order = el("button", {
      title: "In the order of arrival, or branch by branch (o)",
      onclick: () => this.turnOrder(),
    });
    this.keys = el(
      "dl",
      { id: "keys", popover: "auto" },
      KEYS.map(([keys, what]) => [el("dt", {}, keys), el("dd", {}, what)]).flat(),
    );
    const panes = el("div.panes", {}, this.tree.scroll, splitter(), this.details.element);
    const head = el(
      "header.bar",
      {},
      el("a.back", { href: "#" }, "‹ Episodes"),
      el("h1", {}, oneLine(model.name)),
      this.drawFacts(),
      el("div.grow"),
      this.drawTools(),
    );
    view.replaceChildren(el("section.opened", {}, head, this.drawTask(), legend.element, panes));
    document.title = `${model.name} · tree`;
    this.tree.scroll.focus({ preventScroll: true });
  }

  drawFacts() {
    const { meta, counts, liveLeaves } = this.model;
    const facts = [
      meta.task,
      meta.harness,
      meta.status,
      typeof meta.reward === "number" ? `reward ${meta.reward}` : null,
      meta.step === undefined ? null : `step ${meta.step}`,
      plural(counts.calls, "call"),
      `leaves: ${counts.leaves}, trained ${liveLeaves}`,
      this.model.words ? null : "no tokenizer, so ids",
      `${count(counts.tokens)} tokens, ${count(counts.paths)} without sharing`,
    ];
    return el(
      "span.note",
      {},
      facts.filter((fact) => fact !== null && fact !== undefined).map((fact) => el("span", {}, oneLine(String(fact)))),
    );
  }

  drawTask() {
    const { instruction } = this.model.meta;
    return instruction ? el("p.task", { title: oneLine(String(instruction)) }, oneLine(String(instruction))) : null;
  }

  drawTools() {
    const tool = (text, title, onclick) => el("button", { title, onclick }, text);
    return el(
      "span.tools",
      {},
      this.order,
      tool("−", "Smaller (-)", () => this.tree.zoom(-1)),
      tool("+", "Larger (+)", () => this.tree.zoom(1)),
      tool("Fit", "The whole tree in sight (0)", () => this.tree.fit()),
      tool("‹", "Previous episode ([)", () => this.beside(-1)),
      tool("›", "Next episode (])", () => this.beside(1)),
      el("button", { title: "Keys (?)", popovertarget: "keys" }, "?"),
      this.keys,
    );
  }

  show(place) {
    this.place = place;
    if (!this.tree.rows || this.tree.order !== place.order) this.tree.arrange(place.order);
    this.order.textContent = place.order === "branch" ? "By branch" : "By arrival";
    if (!this.tree.rows.length) return;
    const wanted = place.node === null ? null : this.model.nodes[Number(place.node)];
    this.node =
      wanted && wanted.id !== 0
        ? wanted
        : (this.model.nodes.find((node) => node.trained) ??
          this.model.nodes.find((node) => node.sampled) ??
          this.tree.rows[0].node);
    this.tree.show(this.node);
    this.details.show(this.model, this.node, place.tab);
  }

  go(change) {
    history.replaceState(null, "", placeOf({ ...this.place, ...change }));
    follow();
  }

  turnOrder() {
    this.go({ order: this.place.order === "branch" ? "arrival" : "branch" });
  }

  beside(step) {
    const name = list.beside(this.name, step);
    if (name !== null) location.hash = placeOf({ episode: name });
  }

  /** Along the tree: to what it extends, to what goes on from it, to the next branch on either side. */
  walk(key) {
    const { node, model, tree } = this;
    if (key === "ArrowUp" && node.parent > 0) return this.go({ node: node.parent });
    if (key === "ArrowDown" && node.children.length) {
      const row = tree.rowOf.get(node);
      const next = row.nodes.at(-1) === node ? row.heir?.nodes[0] : row.nodes.at(-1);
      return this.go({ node: next.id });
    }
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const step = key === "ArrowLeft" ? -1 : 1;
      for (let at = node; at.parent >= 0; at = model.nodes[at.parent]) {
        const siblings = model.nodes[at.parent].children;
        const beside = siblings[siblings.indexOf(at.id) + step];
        if (beside !== undefined) return this.go({ node: tree.rowOf.get(model.nodes[beside]).node.id });
      }
    }
    return undefined;
  }

  /** To the row above or below, of whatever branch. */
  step(by) {
    const row = this.tree.rows[this.tree.rowOf.get(this.node).index + by];
    if (row) this.go({ node: row.node.id });
  }

  turnTab() {
    const names = Object.keys(TABS);
    this.go({ tab: names[(names.indexOf(this.place.tab) + 1) % names.length] });
  }

  key(event) {
    const keys = {
      j: () => this.step(1),
      k: () => this.step(-1),
      t: () => this.turnTab(),
      o: () => this.turnOrder(),
      "+": () => this.tree.zoom(1),
      "-": () => this.tree.zoom(-1),
      0: () => this.tree.fit(),
      "?": () => this.keys.togglePopover(),
      "[": () => this.beside(-1),
      "]": () => this.beside(1),
    };
    if (event.key.startsWith("Arrow")) this.walk(event.key);
    else if (Object.hasOwn(keys, event.key)) keys[event.key]();
    else return;
    event.preventDefault();
  }
}

/** The bar between tree and details, which can be dragged. */
function splitter() {
  const bar = el("div.splitter", { title: "Drag to resize" });
  bar.addEventListener("pointerdown", (down) => {
    bar.setPointerCapture(down.pointerId);
    bar.onpointermove = (move) => {
      const { left, width } = bar.parentElement.getBoundingClientRect();
      const part = Math.max(0.2, Math.min(0.85, (move.clientX - left) / width));
      view.style.setProperty("--tree", `${100 * part}%`);
    };
    bar.onpointerup = () => (bar.onpointermove = null);
  });
  return bar;
}
