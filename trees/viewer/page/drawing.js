// The tree itself: a row for each call, its lane on the left, what it was fed and what it answered on the right.

const HEIGHTS = [5, 8, 13, 20, 30, 42];
/** From this height on there is room for words. */
const READABLE = 20;

class TreeView {
  level = HEIGHTS.indexOf(30);
  order = "arrival";
  spot = null;

  constructor(model, select) {
    Object.assign(this, { model, select });
    this.gutter = svg("svg", { class: "gutter" });
    this.body = el("div.rows");
    this.canvas = el("div.canvas", {}, this.gutter, this.body);
    this.head = el(
      "div.head",
      {},
      el("span"),
      el("span", {}, `Context, up to ${count(model.longest)}`),
      el("span", {}, "Fed in"),
      el("span", {}, "Sampled"),
    );
    this.scroll = el("div.scroll.tree", { tabIndex: 0 }, this.head, this.canvas);
    // Not passive: with the control key down the wheel zooms the tree in place of the page.
    this.scroll.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.windowed = new Windowed(this.scroll, this.body, (index) => this.draw(index));
    this.windowed.height = HEIGHTS[this.level];
    this.selected = null;
    this.path = new Set();
  }

  arrange(order) {
    this.order = order;
    Object.assign(this, layOut(this.model, order));
    this.resize();
  }

  resize() {
    const height = HEIGHTS[this.level];
    this.spread = Math.min(16, 220 / Math.max(1, this.lanes));
    this.scroll.classList.toggle("tiny", height < READABLE);
    this.scroll.style.setProperty("--gutter", `${this.spread * this.lanes + 12}px`);
    this.drawLines(height);
    this.windowed.set(this.rows.length, height);
  }

  zoom(step) {
    this.level = Math.max(0, Math.min(HEIGHTS.length - 1, this.level + step));
    this.resize();
    if (this.selected) this.windowed.reveal(this.rowOf.get(this.selected).index);
  }

  /** The largest rows with which the whole tree is in sight. */
  fit() {
    const most = (this.scroll.clientHeight - 60) / Math.max(1, this.rows.length);
    const fitting = HEIGHTS.filter((height) => height <= most);
    this.level = Math.max(0, fitting.length - 1);
    this.zoom(0);
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1 : -1);
  }

  show(node) {
    this.selected = node;
    this.path = new Set(
      this.model
        .path(node.id)
        .slice(1)
        .map((above) => this.rowOf.get(above)),
    );
    this.drawLines(HEIGHTS[this.level]);
    this.windowed.reveal(this.rowOf.get(node).index);
    this.windowed.redraw();
  }

  /** Dim all rows in which no node matches; null ends it. */
  spotlight(matches) {
    this.spot = matches;
    this.drawLines(HEIGHTS[this.level]);
    this.windowed.redraw();
  }

  isDim(row) {
    return this.spot !== null && !row.nodes.some(this.spot);
  }

  draw(index) {
    const row = this.rows[index];
    const { node } = row;
    const observation = row.nodes.find((member) => !member.sampled);
    const sampled = node.sampled ? node : null;
    const element = el("div.row", { "data-kind": node.kind, onclick: () => this.select(node) });
    element.classList.toggle("on-path", this.path.has(row));
    element.classList.toggle("dim", this.isDim(row));
    const fed = observation ? this.drawSaid(observation, "observed") : el("span.said");
    const answer = sampled ? this.drawSaid(sampled, node.trained ? "sampled" : "sampled.untrained") : null;
    const chips = el("span.chips", {}, chipsOf(row));
    const cells = answer ? [fed, el("span.answer", {}, answer, chips)] : [el("span.answer.alone", {}, fed, chips)];
    element.append(el("span.ordinal", {}, sampled ? `${node.ordinal}` : ""), this.drawContext(row), ...cells);
    return element;
  }

  /** Where on the way to the longest context the row begins, how much it was fed and how much it answered. */
  drawContext({ nodes }) {
    const part = (tokens) => `${(100 * tokens) / this.model.longest}%`;
    const bars = nodes.map((node) =>
      el(node.sampled ? (node.trained ? "i.sampled" : "i.sampled.untrained") : "i.observed", {
        "--from": part(node.before),
        "--size": part(node.ids.length),
      }),
    );
    const told = nodes.map((node) => `${count(node.ids.length)} ${node.sampled ? "sampled" : "fed in"}`);
    const title = [`${count(nodes[0].before)} tokens before`, ...told].join("\n");
    return el("span.context", { title }, el("i.held", { "--from": "0%", "--size": part(nodes[0].before) }), bars);
  }

  drawSaid(node, what) {
    const choose = (event) => {
      event.stopPropagation();
      this.select(node);
    };
    const said = el(
      `span.said.${what}`,
      { onclick: choose },
      el("small", {}, count(node.ids.length)),
      preview(this.model, node),
    );
    said.classList.toggle("selected", node === this.selected);
    return said;
  }

  drawLines(height) {
    const middle = (row) => [row.lane * this.spread + 12, (row.index + 0.5) * height];
    this.gutter.setAttribute("height", this.rows.length * height);
    this.gutter.setAttribute("width", this.spread * this.lanes + 12);
    const lines = [];
    const marks = [];
    for (const row of this.rows) {
      const [x, y] = middle(row);
      const look = { "data-kind": row.node.kind, class: this.lookOf(row) };
      if (row.parent) lines.push(svg("path", { ...look, d: linePath(middle(row.parent), [x, y], height) }));
      marks.push(drawMark(row.node, x, y, Math.min(5.5, height / 3), look));
    }
    this.gutter.replaceChildren(...lines, ...marks);
  }

  lookOf(row) {
    const looks = [row.node.sampled ? (row.node.trained ? "trained" : "untrained") : "observed"];
    if (this.isDim(row)) looks.push("dim");
    if (this.path.has(row)) looks.push("on-path");
    if (this.selected && this.rowOf.get(this.selected) === row) looks.push("selected");
    return looks.join(" ");
  }
}

/** Down the lane, or first over into another one. */
function linePath([fromX, fromY], [x, y], height) {
  if (fromX === x) return `M${fromX} ${fromY}V${y}`;
  const half = height / 2;
  return `M${fromX} ${fromY}C${fromX} ${fromY + half} ${x} ${fromY + half} ${x} ${fromY + height}V${y}`;
}

function drawMark(node, x, y, size, look) {
  if (node.finish === "abort" && node.sampled) {
    const arm = size * 0.8;
    return svg("path", {
      ...look,
      class: `${look.class} cross`,
      d: `M${x - arm} ${y - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}`,
    });
  }
  if (node.sampled) return svg("circle", { ...look, cx: x, cy: y, r: size });
  return svg("rect", { ...look, x: x - size * 0.8, y: y - size * 0.8, width: size * 1.6, height: size * 1.6, rx: 1 });
}

/** What is out of the ordinary about a row, and changes with it: what a whole line has is said where it begins. */
function chipsOf(row) {
  const { node } = row;
  const before = row.head ? null : row.parent?.node;
  const chips = [];
  const chip = (what, title, ...content) => chips.push(el(`span.chip.${what}`, { title: oneLine(title) }, content));
  const reason = node.sampled && !node.trained ? node.reason || "not trained" : "";
  const isNews = reason && !(before?.sampled && before.reason === node.reason);
  const showsKind = row.head && node.kind !== "main";
  const isNamed = isNews && showsKind && reason.includes(node.kind);
  if (showsKind) chip("kind", node.why || `Kind: ${node.kind}`, isNamed ? oneLine(reason) : node.kind);
  if (node.sampled && node.fork) {
    chip("fork", `Does not extend the newest call of its line: ${node.fork}`, forkSign(), oneLine(node.fork));
  }
  if (isNews && !isNamed) chip("reason", `Not trained: ${reason}`, oneLine(reason.replace(`: ${node.kind}`, "")));
  if (!node.sampled) return chips;
  if (node.finish === "length") chip("cut", "The answer reached its limit of tokens", "cut off");
  if (node.finish === "abort") chip("cut", "The answer was broken off", "aborted");
  if (!node.clean && node.finish === "stop") chip("cut", "A tool call in it could not be parsed", "not clean");
  if (node.drift) {
    chip("drift", "Characters by which the replayed history differs from the held one", `drift ${count(node.drift)}`);
  }
  const versions = node.versions.map(([version]) => version);
  if (versions.length > 1) {
    chip("version", "More than one version of the policy sampled it", `v${versions[0]} → v${versions.at(-1)}`);
  }
  return chips;
}

function forkSign() {
  return svg(
    "svg",
    { class: "sign", viewBox: "0 0 10 10", width: 9, height: 9 },
    svg("path", { d: "M3 0v10M3 3c0 4 5 1 5 7" }),
  );
}
