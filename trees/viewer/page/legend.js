// What the colours and marks mean, with how much of each the tree has; an entry puts its rows in the spotlight.

class Legend {
  constructor(model, spotlight) {
    const entries = [...kindEntries(model), ...stateEntries(model), ...forkEntries(model)];
    let lit = null;
    const buttons = entries.map((entry) => {
      const button = el(
        `button.entry.${entry.look}`,
        { "data-kind": entry.kind ?? "", title: entry.title, "aria-pressed": "false" },
        entry.look === "fork" ? forkSign() : el("i.swatch"),
        entry.label,
        el("small", {}, entry.figures),
      );
      button.addEventListener("click", () => {
        lit = lit === entry ? null : entry;
        buttons.forEach((other, index) => other.setAttribute("aria-pressed", String(entries[index] === lit)));
        spotlight(lit && lit.matches);
      });
      return button;
    });
    this.element = el("div.legend", {}, buttons);
  }
}

function tally(nodes) {
  const tokens = nodes.reduce((total, node) => total + node.ids.length, 0);
  return `${plural(nodes.length, "call")}, ${count(tokens)} tok`;
}

function kindEntries(model) {
  const sampled = model.nodes.filter((node) => node.sampled);
  return KINDS.map((kind) => ({
    kind,
    label: kind,
    look: "kind",
    nodes: sampled.filter((node) => node.kind === kind),
    matches: (node) => node.kind === kind,
    title: `Calls of kind ${kind}`,
  }))
    .filter(({ nodes }) => nodes.length)
    .map((entry) => ({ ...entry, figures: tally(entry.nodes) }));
}

function stateEntries(model) {
  const groups = new Map([
    ["observed", []],
    ["trained", []],
  ]);
  for (const node of model.nodes.slice(1)) {
    if (!groups.has(state(node))) groups.set(state(node), []);
    groups.get(state(node)).push(node);
  }
  return [...groups]
    .filter(([, nodes]) => nodes.length)
    .map(([name, nodes]) => {
      const look = name === "observed" || name === "trained" ? name : "untrained";
      const tokens = nodes.reduce((total, node) => total + node.ids.length, 0);
      return {
        label: oneLine(look === "observed" ? "fed in" : name),
        look,
        figures: look === "observed" ? `${count(tokens)} tok` : tally(nodes),
        matches: (node) => state(node) === name,
        title:
          { observed: "Observed: what the harness fed in", trained: "Sampled, and in the loss" }[look] ??
          `Sampled, not in the loss: ${oneLine(name)}`,
      };
    });
}

function forkEntries(model) {
  const groups = new Map();
  for (const node of model.nodes) {
    if (node.sampled && node.fork) groups.set(node.fork, [...(groups.get(node.fork) ?? []), node]);
  }
  return [...groups].map(([name, nodes]) => ({
    label: oneLine(name),
    look: "fork",
    figures: plural(nodes.length, "call"),
    matches: (node) => node.sampled && node.fork === name,
    title: "Calls that do not extend the newest call of their line, by the reason",
  }));
}
