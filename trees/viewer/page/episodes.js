// The list of episodes: sorted, filtered, and only the rows in sight drawn.

const COLUMNS = [
  { key: "episode", title: "Episode", width: "minmax(150px, 1.5fr)" },
  { key: "step", title: "Step", width: "60px", number: true },
  { key: "task", title: "Task", width: "minmax(120px, 1.5fr)" },
  { key: "family", title: "Family", width: "minmax(80px, .7fr)" },
  { key: "harness", title: "Harness", width: "minmax(100px, .8fr)" },
  { key: "reward", title: "Reward", width: "104px", number: true },
  { key: "status", title: "Status", width: "112px" },
  { key: "calls", title: "Calls", width: "70px", number: true },
  { key: "leaves", title: "Leaves", width: "76px", number: true, hint: "Leaves that are trained" },
  { key: "tokens", title: "Tokens", width: "96px", number: true },
  { key: "trained", title: "Trained", width: "104px", number: true },
];
const LIST_ROW = 32;
const collator = new Intl.Collator("en", { numeric: true });

class EpisodeList {
  rows = [];
  about = null;
  shown = [];
  sort = { key: null, down: false };

  constructor(open) {
    this.open = open;
    this.search = el("input", {
      type: "search",
      placeholder: "Filter: words of task, harness, status …",
      oninput: () => this.refresh(),
    });
    this.status = el("select", { title: "Status", onchange: () => this.refresh() });
    this.summary = el("p.summary");
    this.head = el("div.head", { role: "row" });
    this.body = el("div.rows");
    this.scroll = el("div.scroll", { tabIndex: 0 }, this.head, this.body);
    this.title = el("h1", {}, "Trees");
    this.note = el("span.note");
    const bar = el("header.bar", {}, this.title, this.note, el("div.grow"), this.search, this.status);
    this.element = el("section.list", {}, bar, this.summary, this.scroll);
    this.windowed = new Windowed(this.scroll, this.body, (index) => this.draw(index));
    this.current = 0;
  }

  take(rows, about) {
    for (const row of rows) {
      row.words = ["episode", "task", "family", "harness", "status", "split"]
        .map((key) => row[key] ?? "")
        .join(" ")
        .toLowerCase();
      this.rows.push(row);
    }
    this.about = about;
    this.title.textContent = about.place;
    const none = about.without_tree;
    this.note.textContent = none
      ? `${plural(none, "more episode")} without a tree: evaluation, failed, or no longer kept`
      : "";
    this.columns = COLUMNS.filter(({ key }) => this.rows.some((row) => row[key] !== null && row[key] !== undefined));
    this.head.style.gridTemplateColumns = this.columns.map(({ width }) => width).join(" ");
    this.head.replaceChildren(...this.columns.map((column) => this.drawTitle(column)));
    this.offerStatuses();
    this.refresh();
  }

  drawTitle({ key, title, number, hint }) {
    const arrow = this.sort.key === key ? (this.sort.down ? " ↓" : " ↑") : "";
    const sort = () => {
      this.sort = { key, down: this.sort.key === key ? !this.sort.down : Boolean(number) && key !== "step" };
      this.head.replaceChildren(...this.columns.map((column) => this.drawTitle(column)));
      this.refresh();
    };
    return el(
      number ? "button.number" : "button",
      { onclick: sort, title: hint ?? `Sort by ${title.toLowerCase()}` },
      title + arrow,
    );
  }

  offerStatuses() {
    const chosen = this.status.value;
    const counts = new Map();
    for (const { status } of this.rows) counts.set(status ?? "", (counts.get(status ?? "") ?? 0) + 1);
    const options = [...counts]
      .sort()
      .map(([name, number]) => el("option", { value: name }, `${name || "no status"} (${number})`));
    this.status.replaceChildren(el("option", { value: "*" }, "all statuses"), ...options);
    this.status.value = chosen && (chosen === "*" || counts.has(chosen)) ? chosen : "*";
  }

  refresh() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const status = this.status.value;
    this.shown = this.rows.filter(
      (row) => (status === "*" || (row.status ?? "") === status) && words.every((word) => row.words.includes(word)),
    );
    const { key, down } = this.sort;
    if (key) this.shown.sort((one, other) => compare(one[key], other[key], down));
    this.current = Math.min(this.current, Math.max(0, this.shown.length - 1));
    this.windowed.set(this.shown.length, LIST_ROW);
    this.summarise();
  }

  summarise() {
    const rewards = this.shown.map((row) => row.reward).filter((reward) => typeof reward === "number");
    const sum = (key) => this.shown.reduce((total, row) => total + (row[key] ?? 0), 0);
    const of = this.shown.length === this.rows.length ? "" : ` of ${count(this.rows.length)}`;
    const coming = this.about.total - this.rows.length;
    const facts = [
      `${count(this.shown.length)}${of} episode${this.rows.length === 1 ? "" : "s"}`,
      rewards.length ? `mean reward ${(rewards.reduce((a, b) => a + b, 0) / rewards.length).toFixed(3)}` : null,
      `${count(sum("tokens"))} tokens, ${percent(sum("trained"), sum("tokens"))} of them trained`,
      coming > 0 ? `reading ${count(coming)} more …` : null,
    ];
    this.summary.textContent = facts.filter(Boolean).join("  ·  ");
  }

  draw(index) {
    const row = this.shown[index];
    // What is wrong stands where the figures of a tree would.
    const columns = row.error
      ? this.columns.slice(0, this.columns.findIndex(({ key }) => key === "status") + 1)
      : this.columns;
    const cells = columns.map(({ key, number }) => el(number ? "span.number" : "span", {}, this.cell(row, key)));
    if (row.error) cells.push(el("span.error", { "--from": columns.length + 1 }, oneLine(row.error)));
    const element = el("a.row", { href: placeOf({ episode: row.episode }), title: row.error ?? "" }, cells);
    element.style.gridTemplateColumns = this.head.style.gridTemplateColumns;
    element.classList.toggle("current", index === this.current);
    return element;
  }

  cell(row, key) {
    const value = row[key];
    if (key === "reward" && typeof value === "number") {
      const meter = el("i.meter", { "--part": `${100 * Math.max(0, Math.min(1, value))}%` });
      return [value.toFixed(2), meter];
    }
    if (key === "status" && value) return el("b.status", { "data-status": value }, oneLine(value));
    if (key === "trained" && typeof value === "number")
      return [count(value), el("small", {}, percent(value, row.tokens))];
    if (typeof value === "number") return count(value);
    return value === null || value === undefined ? "" : oneLine(String(value));
  }

  move(step) {
    this.current = Math.max(0, Math.min(this.shown.length - 1, this.current + step));
    this.windowed.reveal(this.current);
    this.windowed.redraw();
  }

  /** The name of the episode `step` further in the order that is shown; null at the ends. */
  beside(name, step) {
    const at = this.shown.findIndex((row) => row.episode === name);
    return at < 0 ? null : (this.shown[at + step]?.episode ?? null);
  }

  standOn(name) {
    const at = this.shown.findIndex((row) => row.episode === name);
    if (at >= 0) this.current = at;
  }
}

/** Rows without a value come last in both directions. */
function compare(one, other, down) {
  const [missing, alsoMissing] = [one, other].map((value) => value === null || value === undefined);
  if (missing || alsoMissing) return missing - alsoMissing;
  const order = typeof one === "number" && typeof other === "number" ? one - other : collator.compare(one, other);
  return down ? -order : order;
}
