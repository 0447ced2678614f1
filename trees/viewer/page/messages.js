// Tokens to the messages that they spell. Only marks of the vocabulary open and end a turn, never text that looks so.

/** Marks that open a turn: after them stands the role, up to this text. */
const OPENING = new Map([
  ["<|im_start|>", "\n"],
  ["<start_of_turn>", "\n"],
  ["<|start_header_id|>", "<|end_header_id|>"],
  ["<|start|>", "<|message|>"],
]);
/** Marks that are a role by themselves. */
const ROLES = new Map([
  ["<|system|>", "system"],
  ["<|user|>", "user"],
  ["<|assistant|>", "assistant"],
  ["<|observation|>", "tool"],
  ["<｜User｜>", "user"],
  ["<｜Assistant｜>", "assistant"],
]);
const CLOSING = new Set([
  ..."<|im_end|> <|eot_id|> <|eom_id|> <|end|> <|call|> <|return|> <end_of_turn> <|endoftext|>".split(" "),
  "<｜end▁of▁sentence｜>",
]);

/**
 * The messages along a path: `role`, `node` (that of its last token), `tokens`, `closed`, and `parts`: texts and marks,
 * each with its node. Tokens before any opening are a message without a role, one for each node.
 */
class MessageReader {
  messages = [];
  message = null;
  /** The text that ends the role which is being read; null between. */
  until = null;

  constructor(model) {
    this.model = model;
  }

  open(role) {
    this.message = { role, parts: [], node: null, tokens: 0, closed: false };
    this.messages.push(this.message);
  }

  read(node, limit) {
    this.model.texts(node, limit).forEach((text, index) => {
      this.take(text, node, this.model.isMark(node.ids[index]));
      if (this.message) this.message.tokens += 1;
    });
  }

  take(text, node, mark) {
    if (this.until !== null) this.takeRole(text, node);
    else if (mark && OPENING.has(text)) {
      this.open("");
      this.until = OPENING.get(text);
    } else if (mark && ROLES.has(text)) this.open(ROLES.get(text));
    else if (mark && CLOSING.has(text)) {
      if (this.message) this.message.closed = true;
    } else this.say(text, node, mark);
  }

  takeRole(text, node) {
    const end = text.indexOf(this.until);
    this.message.role += end < 0 ? text : text.slice(0, end);
    if (end < 0) return;
    this.message.role = this.message.role.trim();
    const rest = text.slice(end + this.until.length);
    this.until = null;
    this.say(rest, node, false);
  }

  say(text, node, mark) {
    const outside = !this.message || this.message.closed;
    if (!text || (outside && !text.trim())) return;
    if (outside || (this.message.role === "" && this.message.node !== node)) this.open("");
    const last = this.message.parts.at(-1);
    if (last && last.node === node && !mark && !last.mark) last.text += text;
    else this.message.parts.push({ text, node, mark });
    this.message.node = node;
  }
}

/** The messages of the first `limit` tokens of each node of a path; a turn that is only opened is none. */
function messagesOf(model, path, limit = Infinity) {
  const reader = new MessageReader(model);
  for (const node of path) reader.read(node, limit);
  return reader.messages.filter((message) => message.parts.length || message.closed);
}

/** How most chat templates begin a call of a tool; the name says more in a narrow place. */
const TOOL_CALL = /\{"name": "([\w.-]+)", "arguments": /g;

/** The beginning of what a node says, on one line; only its first tokens are looked at. */
function preview(model, node) {
  if (node.preview === undefined) {
    const messages = messagesOf(model, [node], 160);
    const said = (withMarks) =>
      messages.map(({ role, parts }) => {
        const text = parts.map((part) => (part.mark && !withMarks ? " " : part.text)).join("");
        return role && role !== "user" ? `${role}: ${text}` : text.trim();
      });
    const text = said(false).filter(Boolean).join(" · ") || said(true).join(" ");
    node.preview = oneLine(text.replace(TOOL_CALL, "→ $1 ").slice(0, 400));
  }
  return node.preview;
}
