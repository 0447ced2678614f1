// A long list of which only the rows in sight exist.

class Windowed {
  /** `draw(index)` makes a row; rows lie in `viewport`, which scrolls, above each other in `body`. */
  constructor(viewport, body, draw) {
    Object.assign(this, { viewport, body, draw, total: 0, height: 30, first: 0, last: -1 });
    viewport.addEventListener("scroll", () => this.show());
    new ResizeObserver(() => this.show()).observe(viewport);
  }

  set(total, height) {
    Object.assign(this, { total, height });
    this.body.style.height = `${total * height}px`;
    this.redraw();
  }

  redraw() {
    this.last = -1;
    this.show();
  }

  show() {
    const top = this.viewport.scrollTop - this.offset();
    const first = Math.max(0, Math.floor(top / this.height) - 10);
    const last = Math.min(this.total - 1, Math.ceil((top + this.viewport.clientHeight) / this.height) + 10);
    if (first === this.first && last === this.last) return;
    Object.assign(this, { first, last });
    const rows = [];
    for (let index = first; index <= last; index += 1) {
      const row = this.draw(index);
      row.style.top = `${index * this.height}px`;
      row.style.height = `${this.height}px`;
      rows.push(row);
    }
    this.body.replaceChildren(...rows);
  }

  /** Where the rows begin in what scrolls. */
  offset() {
    const { viewport, body } = this;
    return body.getBoundingClientRect().top - viewport.getBoundingClientRect().top + viewport.scrollTop;
  }

  /** Scroll as little as makes a row visible, with some of its neighbours. */
  reveal(index) {
    const margin = Math.min(Math.max(2 * this.height, 40), this.viewport.clientHeight / 4);
    const top = index * this.height + this.offset();
    const { scrollTop, clientHeight } = this.viewport;
    if (top - margin < scrollTop) this.viewport.scrollTop = top - margin;
    else if (top + this.height + margin > scrollTop + clientHeight) {
      this.viewport.scrollTop = top + this.height + margin - clientHeight;
    }
    this.show();
  }
}
