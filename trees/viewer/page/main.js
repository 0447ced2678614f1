// What is shown, kept in the address after "#" so that it can be sent to somebody, and the keys.

const view = document.getElementById("view");
const list = new EpisodeList();
let shown = null;

function placeOf(place) {
  return `#${new URLSearchParams(Object.entries(place).filter(([, value]) => value !== null && value !== undefined))}`;
}

function readPlace() {
  const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return {
    episode: place.episode ?? null,
    node: place.node ?? null,
    tab: Object.hasOwn(TABS, place.tab ?? "") ? place.tab : "tokens",
    order: place.order === "branch" ? "branch" : "arrival",
  };
}

async function follow() {
  const place = readPlace();
  if (place.episode === null) return showList();
  if (shown?.name !== place.episode) {
    shown = { name: place.episode };
    view.replaceChildren(el("p.wait", {}, `Reading ${oneLine(place.episode)} …`));
    const wanted = shown;
    const result = await readTree(place.episode, list.rows).catch((error) => error);
    if (wanted !== shown) return undefined;
    if (result instanceof Error) return showFailure(place.episode, result.message);
    shown = new Opened(result, place);
  }
  return shown.show?.(place);
}

function showList() {
  if (shown) list.standOn(shown.name);
  shown = null;
  document.title = list.about ? `${list.about.place} · trees` : "Trees";
  view.replaceChildren(list.element);
  list.windowed.redraw();
  list.scroll.focus({ preventScroll: true });
  list.move(0);
}

function showFailure(name, message) {
  view.replaceChildren(
    el(
      "section.failure",
      {},
      el("a", { href: "#" }, "‹ Episodes"),
      el("h1", {}, oneLine(name)),
      el("p", {}, visible(message)),
    ),
  );
}

function onKey(event) {
  if (event.altKey || event.metaKey || event.ctrlKey || event.target.closest("input, select")) return;
  if (shown && event.key === "Escape") location.hash = "";
  if (shown) return shown.key?.(event);
  const steps = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 };
  if (Object.hasOwn(steps, event.key)) list.move(steps[event.key]);
  else if (event.key === "Enter" && list.shown.length && !event.target.closest("a, button"))
    location.hash = placeOf({ episode: list.shown[list.current].episode });
  else if (event.key === "/") list.search.focus();
  else return undefined;
  event.preventDefault();
  return undefined;
}

addEventListener("hashchange", follow);
addEventListener("keydown", onKey);

async function start() {
  const alone = (rows, about) => about.total === 1 && !readPlace().episode && rows.length === 1;
  if (!embedded && readPlace().episode) follow();
  try {
    await readRows((rows, about) => {
      list.take(rows, about);
      if (alone(rows, about)) history.replaceState(null, "", placeOf({ episode: rows[0].episode }));
      if (!shown && !list.element.isConnected) follow();
    });
  } catch (error) {
    showFailure("The list could not be read", error.message);
  }
}

start();
