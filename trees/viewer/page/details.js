// One node: its facts, its tokens, its messages, and the conversation above it.

const TABS = { tokens: "Tokens", messages: "Messages", conversation: "Conversation" };
const FIRST_TOKENS = 1500;
const FIRST_CHARACTERS = 1600;

class Details {
  tab = "tokens";

  constructor(choose, jump) {
    this.jump = jump;
    this.facts = el("dl.facts");
    this.title = el("h2");
    this.buttons = Object.entries(TABS).map(([name, title]) =>
      el("button", { role: "tab", "data-tab": name, onclick: () => choose(name) }, title),
    );
    this.content = el("div.content.scroll", { tabIndex: 0 });
    this.tip = el("div.tip", { hidden: true });
    this.content.addEventListener("mousemove", (event) => this.hover(event));
    this.content.addEventListener("mouseleave", () => (this.tip.hidden = true));
    const tabs = el("nav.tabs", { role: "tablist" }, this.buttons);
    this.element = el("aside.details", {}, this.title, this.facts, tabs, this.content, this.tip);
  }

  show(model, node, tab) {
    Object.assign(this, { model, node, tab });
    for (const button of this.buttons) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
    this.title.replaceChildren(...titleOf(node));
    this.facts.replaceChildren(
      ...factsOf(model, node).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    );
    this.tip.hidden = true;
    const draw = { tokens: this.drawTokens, messages: this.drawMessages, conversation: this.drawConversation }[tab];
    this.content.replaceChildren(...draw.call(this));
    this.content.scrollTop = tab === "conversation" ? this.content.scrollHeight : 0;
  }

  drawTokens() {
    const { model, node } = this;
    const block = el("div.tokens", {}, tokensOf(model, node, 0, FIRST_TOKENS));
    const rest = node.ids.length - FIRST_TOKENS;
    const more = el("button.more", {}, `show ${plural(rest, "more token")}`);
    more.addEventListener("click", () => {
      block.append(...tokensOf(model, node, FIRST_TOKENS, node.ids.length));
      more.remove();
    });
    return [node.sampled ? scale() : null, block, rest > 0 ? more : null].filter(Boolean);
  }

  drawMessages() {
    const messages = messagesOf(this.model, [this.node]);
    return messages.length
      ? messages.map((message) => drawMessage(message, this.node))
      : [el("p.none", {}, "No text.")];
  }

  drawConversation() {
    return messagesOf(this.model, this.model.path(this.node.id)).map((message) =>
      drawMessage(message, this.node, this.jump),
    );
  }

  hover(event) {
    const token = event.target.closest("[data-at]");
    this.tip.hidden = !token;
    if (!token) return;
    this.tip.replaceChildren(...tipOf(this.model, this.node, Number(token.dataset.at)));
    const box = this.tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const below = event.clientY + 18;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${below + box.height > window.innerHeight ? event.clientY - box.height - 12 : below}px`;
  }
}

function titleOf(node) {
  const what = node.sampled ? `Call ${node.ordinal}` : "Fed in";
  return [
    el("i.swatch", {
      "data-kind": node.kind,
      className: `swatch ${state(node) === "trained" || !node.sampled ? state(node) : "untrained"}`,
    }),
    what,
    el("small", {}, `${plural(node.ids.length, "token")} after ${count(node.before)}`),
  ];
}

function factsOf(model, node) {
  const logprobs = node.logprobs.filter((value) => value !== null);
  const mean = logprobs.reduce((total, value) => total + value, 0) / logprobs.length;
  const facts = [
    ["kind", oneLine(node.why ? `${node.kind}: ${node.why}` : node.kind)],
    ["fork", node.fork && oneLine(node.fork)],
    ["drift", node.drift ? `${count(node.drift)} characters` : ""],
  ];
  if (node.sampled) {
    facts.push(
      ["training", node.trained ? "trained" : `not trained: ${oneLine(node.reason || "no reason given")}`],
      [
        "policy",
        node.versions
          .map(([version, start, end]) => (node.versions.length > 1 ? `v${version} [${start}, ${end})` : `v${version}`))
          .join("  "),
      ],
      ["finish", node.clean ? node.finish : `${node.finish}, not clean`],
      ["temperature", String(node.temperature)],
      ["log-prob.", logprobs.length ? `mean ${mean.toFixed(3)}, lowest ${Math.min(...logprobs).toFixed(2)}` : ""],
    );
  } else facts.push(["shared by", plural(callsBelow(model, node), "call")]);
  facts.push(
    [node.sampled ? "call" : "first call", el("code", {}, oneLine(node.call))],
    ["node", `${node.id}, below ${node.parent}`],
  );
  return facts.filter(([, value]) => value);
}

/** Calls whose context holds the node. */
function callsBelow(model, node) {
  let calls = 0;
  const open = [node];
  while (open.length) {
    const at = open.pop();
    calls += at.sampled ? 1 : 0;
    open.push(...at.children.map((id) => model.nodes[id]));
  }
  return calls;
}

/** 0 for a token that was certain, 1 for one that nobody would have expected (log-probability -6 and below). */
function surprise(logprob) {
  return Math.min(1, Math.sqrt(Math.max(0, -logprob) / 6));
}

function tokensOf(model, node, from, to) {
  const elements = [];
  model
    .texts(node, to)
    .slice(from)
    .forEach((text, offset) => {
      const at = from + offset;
      const start = node.versions.length > 1 && node.versions.find(([, first]) => first === at);
      if (start) elements.push(el("span.version", {}, `v${start[0]}`));
      const classes = [
        model.isMark(node.ids[at]) ? ".mark" : "",
        at % 2 ? ".odd" : "",
        text === "" ? ".rest" : "",
      ].join("");
      const shown = text === "" ? "·" : visible(text).replaceAll("\n", "↵\n");
      const token = el(`span${classes}`, { "data-at": at }, shown);
      const logprob = node.logprobs[at];
      if (logprob !== undefined && logprob !== null)
        token.style.setProperty("--surprise", `${100 * surprise(logprob)}%`);
      elements.push(token);
    });
  return elements;
}

function scale() {
  const steps = [0, -0.1, -0.7, -2.3, -6].map((logprob) =>
    el("span", { "--surprise": `${100 * surprise(logprob)}%` }, String(logprob)),
  );
  return el("p.scale", {}, "log-probability", steps);
}

function tipOf(model, node, at) {
  const text = model.words ? JSON.stringify(visible(model.texts(node)[at])) : "";
  const logprob = node.logprobs[at];
  const facts = [
    [`id ${node.ids[at]}`, `token ${at + 1} of ${count(node.ids.length)}`],
    logprob === undefined
      ? null
      : ["log-prob.", logprob === null ? "none" : `${logprob.toFixed(4)}  (p ${Math.exp(logprob).toPrecision(3)})`],
    node.sampled ? ["policy", `v${model.versionAt(node, at) ?? "?"}`] : null,
  ];
  const lines = facts.filter(Boolean).map(([name, value]) => el("div", {}, el("span", {}, name), value));
  return [text ? el("code", {}, text) : "", ...lines];
}

/** A message with its role; `jump` makes its head lead to its node. */
function drawMessage(message, selected, jump) {
  const { node } = message;
  const sampled = node?.sampled ?? false;
  const mine = message.parts.some((part) => part.node === selected);
  const element = el(`article.message${sampled ? ".sampled" : ""}${mine && jump ? ".mine" : ""}`, {
    "data-kind": node?.kind ?? "",
  });
  const call = sampled ? `call ${node.ordinal}` : "";
  const fate = sampled ? (node.trained ? "trained" : `not trained: ${oneLine(node.reason)}`) : "";
  const facts = [call, fate, plural(message.tokens, "token")].filter(Boolean).join(" · ");
  const head = el(
    jump && node ? "button.who" : "div.who",
    {},
    oneLine(message.role) || (sampled ? "assistant" : "text"),
    el("small", {}, facts),
  );
  if (jump && node) head.addEventListener("click", () => jump(node));
  element.append(head, drawText(message.parts));
  return element;
}

/** Texts with the marks between them; a long one shows its beginning first. */
function drawText(parts) {
  const block = el("div.text");
  const total = parts.reduce((sum, part) => sum + part.text.length, 0);
  const fill = (limit) => {
    let left = limit;
    const pieces = [];
    for (const part of parts) {
      if (left <= 0) break;
      const text = visible(part.text.slice(0, left));
      left -= part.text.length;
      pieces.push(part.mark ? el("span.mark", {}, text) : text);
    }
    block.replaceChildren(...pieces);
  };
  // A little more than the limit is shown whole: a button for two lines would be a nuisance.
  if (total <= FIRST_CHARACTERS * 1.25) {
    fill(Infinity);
    return block;
  }
  fill(FIRST_CHARACTERS);
  const more = el("button.more", { onclick: () => fill(Infinity) }, `show all ${count(total)} characters`);
  block.append(more);
  return block;
}
