// Shows the figures of the step under the pointer, and remembers nothing.

const tip = document.getElementById("tip");

function nearest(places, at) {
  let best = 0;
  for (let i = 1; i < places.length; i++) if (Math.abs(places[i] - at) < Math.abs(places[best] - at)) best = i;
  return best;
}

function part(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}

function fill(hover, index) {
  tip.replaceChildren(part("b", `step ${hover.x[index]}`));
  const list = document.createElement("dl");
  for (const line of hover.lines) {
    if (line.y[index] === null) continue;
    const name = part("dt", line.name);
    name.className = line.c;
    list.append(name, part("dd", line.y[index]));
  }
  tip.append(list);
}

function place(event) {
  const wide = tip.offsetWidth;
  const high = tip.offsetHeight;
  const right = event.clientX + 16 + wide < document.documentElement.clientWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX + 16 : event.clientX - wide - 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, window.innerHeight - high - 8))}px`;
}

for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector(":scope > svg");
  const guide = svg.querySelector(".guide");
  let hover = null;
  svg.addEventListener("pointermove", (event) => {
    hover ??= JSON.parse(chart.dataset.hover);
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const index = nearest(hover.at, at);
    guide.setAttribute("x1", hover.at[index]);
    guide.setAttribute("x2", hover.at[index]);
    guide.classList.add("on");
    fill(hover, index);
    tip.hidden = false;
    place(event);
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    guide.classList.remove("on");
  });
}
document.documentElement.dataset.ready = document.querySelectorAll(".chart").length;
