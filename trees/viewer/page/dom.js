// Elements and texts. Nothing here or elsewhere makes markup of a text: trees hold what an agent read.

/** An element: `what` is "tag.class.class"; properties are set, "on..." are listeners; texts become text nodes. */
function el(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same in SVG; all properties are attributes. */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Control characters, and those that would reorder or hide the text around them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A text whose unseen characters are written out; line ends and tabs stay. */
function visible(text) {
  return String(text).replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A text on one line, for titles and previews. */
function oneLine(text) {
  return visible(String(text).replace(/\s+/g, " ").trim());
}

function count(number) {
  return number === null || number === undefined ? "–" : number.toLocaleString("en-US");
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function percent(part, whole) {
  if (!whole) return "–";
  const rounded = Math.round((100 * part) / whole);
  return part > 0 && rounded === 0 ? "<1%" : `${rounded}%`;
}
