"use strict";
// Pictures on canvases. Text of a run is drawn on them or put into text nodes; nothing becomes HTML.
const $ = id => document.getElementById(id);
const COLOURS = Array.from({ length: 8 }, (_, i) => `--c${i}`);
const finite = x => typeof x === "number" && Number.isFinite(x);

/** A colour of the page's style as it is now, light or dark; canvases know no variables. */
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) {
    const probe = document.body.appendChild(el("i"));
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

function el(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** A number as a person reads it: 4 digits, thousands as k and M, small ones with an exponent. */
function short(value) {
  if (!finite(value)) return String(value ?? "—");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e12)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= unit) return `${Number((value / (sign === "k" ? 1e3 : unit)).toPrecision(4))}${sign}`;
  return String(Number(value.toPrecision(4)));
}

/** A text as it is, with invisible and reordering characters as their code. */
const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const plain = text => String(text).replace(HIDDEN, c => `\\u{${c.codePointAt(0).toString(16)}}`);

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(x => x * power >= rough) * power;
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) made.push(Number((i * step).toPrecision(12)));
  return made;
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), step = Math.max(1, Math.ceil((last - first) / count));
  const made = [];
  for (let i = first; i <= last; i += step) made.push(10 ** i);
  const within = made.filter(x => x >= low * 0.999 && x <= high * 1.001);
  return within.length >= 2 ? within : ticks(low, high, count);
}

const tip = {
  show(lines, x, y) {
    if (!lines || !lines.length) return this.hide();
    const box = $("tip");
    box.replaceChildren(...lines.map(line => typeof line === "string" ? el("div", { textContent: line }) : line));
    box.hidden = false;
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${y + 16 + box.offsetHeight > innerHeight ? Math.max(4, y - box.offsetHeight - 10) : y + 16}px`;
  },
  hide() { $("tip").hidden = true; },
};

/** A line of the tip with a patch of colour before it. */
function patch(colourOf, text) {
  const mark = el("i");
  mark.style.background = colourOf;
  return el("div", {}, mark, text);
}

/** A canvas with axes. A subclass has `extent()`, `paint()` and perhaps `about(x, y)`, lines of what is there, and
    `picked(x, y)`, what a click does. Dragging chooses a range of x, of which `ranged` is told; null for all of it. */
class Picture {
  constructor(canvas, options = {}) {
    Object.assign(this, { canvas, left: 48, bottom: 20, top: 8, right: 10, ...options });
    canvas.picture = this;
    canvas.addEventListener("pointermove", event => this.move(event));
    canvas.addEventListener("pointerleave", () => { this.at = this.from = null; tip.hide(); this.draw(); });
    canvas.addEventListener("pointerdown", event => { this.from = this.drags ? event.offsetX : null; this.begun = event.offsetX; });
    canvas.addEventListener("pointerup", event => this.up(event));
    canvas.addEventListener("dblclick", () => this.ranged?.(null));
  }

  get drags() { return Boolean(this.ranged); }

  draw() {
    const { canvas } = this, ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width || !height) return;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    const context = this.context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    Object.assign(this, { width, height });
    const extent = this.extent();
    if (!extent) return this.note("nothing to show");
    this.range = extent;
    this.paint();
    if (finite(this.from) && finite(this.at?.x)) {
      context.fillStyle = colour("--chosen");
      context.globalAlpha = 0.5;
      context.fillRect(Math.min(this.from, this.at.x), this.top, Math.abs(this.at.x - this.from), height - this.top - this.bottom);
      context.globalAlpha = 1;
    }
  }

  note(text) {
    this.context.fillStyle = colour("--soft");
    this.context.textAlign = "center";
    this.context.fillText(text, this.width / 2, this.height / 2);
  }

  /** Positions of values; `y` is null for what a logarithmic axis does not have. */
  px(x) { const [low, high] = this.range.x; return this.left + (x - low) / (high - low || 1) * (this.width - this.left - this.right); }
  py(y) {
    const [low, high] = this.range.y, inner = this.height - this.top - this.bottom;
    if (!finite(y) || (this.log && y <= 0)) return null;
    const share = this.log ? Math.log(y / low) / Math.log(high / low || 2) : (y - low) / (high - low || 1);
    return this.top + (1 - share) * inner;
  }
  xAt(px) { const [low, high] = this.range.x; return low + (px - this.left) / (this.width - this.left - this.right) * (high - low); }

  axes(yText = short, xText = x => short(x), whole = true) {
    const { context, width, height } = this, [low, high] = this.range.y, rows = Math.max(2, Math.floor((height - 30) / 24));
    const values = this.log ? logTicks(low, high, rows) : ticks(low, high, rows), texts = values.map(yText);
    this.left = Math.max(30, ...texts.map(text => context.measureText(text).width + 12));
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--soft");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.beginPath();
    values.forEach((value, i) => {
      const y = Math.round(this.py(value)) + 0.5;
      context.moveTo(this.left, y);
      context.lineTo(width - this.right, y);
      context.fillText(texts[i], this.left - 6, y);
    });
    context.stroke();
    context.textBaseline = "alphabetic";
    const count = Math.max(1, Math.floor((width - this.left) / 70));
    for (const value of ticks(...this.range.x, count).filter(x => !whole || Number.isInteger(x))) {
      const text = xText(value), half = context.measureText(text).width / 2, x = this.px(value);
      context.textAlign = x + half > width ? "right" : x - half < 0 ? "left" : "center";
      context.fillText(text, Math.min(x, width - 1), height - 6);
    }
  }

  move(event) {
    this.at = { x: event.offsetX, y: event.offsetY };
    if (!this.range) return;
    this.draw();
    tip.show(this.about?.(event.offsetX, event.offsetY), event.clientX, event.clientY);
  }

  up(event) {
    const from = this.from;
    this.from = null;
    if (finite(from) && Math.abs(event.offsetX - from) > 8) this.ranged([from, event.offsetX].map(x => this.xAt(x)).sort((a, b) => a - b));
    else if (this.range && Math.abs(event.offsetX - this.begun) <= 8) this.picked?.(event.offsetX, event.offsetY);
    this.draw();
  }
}

/** Lines over steps. `series`: [{ x, y, smooth, colour, label, dashed, bad }]. */
class Lines extends Picture {
  extent() {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const { x, y } of this.series ?? []) {
      for (let i = 0; i < x.length; i++) {
        if (x[i] < x0) x0 = x[i];
        if (x[i] > x1) x1 = x[i];
        if (!finite(y[i]) || (this.log && y[i] <= 0)) continue;
        if (y[i] < y0) y0 = y[i];
        if (y[i] > y1) y1 = y[i];
      }
    }
    if (x0 > x1) return null;
    if (y0 > y1) [y0, y1] = [0, 1];
    if (this.log) return { x: [x0, x1 > x0 ? x1 : x0 + 1], y: y1 > y0 ? [y0, y1] : [y0 / 2, y0 * 2] };
    const room = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1;
    return { x: x1 > x0 ? [x0, x1] : [x0 - 1, x1 + 1], y: [y0 >= 0 && y0 - room < 0 ? 0 : y0 - room, y1 + room] };
  }

  paint() {
    const { context } = this;
    this.axes(undefined, this.xText, this.whole ?? true);
    for (const one of this.series.toReversed()) { // the run's own above the other's
      if (one.smooth) this.line(one.x, one.y, one, 0.28);
      this.line(...(one.smooth ? [one.smooth.x, one.smooth.y] : [one.x, one.y]), one, 1);
      context.fillStyle = colour("--bad");
      for (const x of one.bad ?? []) context.fillRect(this.px(x) - 1, this.height - this.bottom - 6, 2, 6);
    }
    if (this.at && !finite(this.from) && this.at.x >= this.left) {
      context.strokeStyle = colour("--soft");
      context.beginPath();
      context.moveTo(this.at.x + 0.5, this.top);
      context.lineTo(this.at.x + 0.5, this.height - this.bottom);
      context.stroke();
    }
  }

  line(xs, ys, one, alpha) {
    const { context } = this;
    context.strokeStyle = context.fillStyle = colour(one.colour);
    context.globalAlpha = alpha;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.setLineDash(one.dashed ? [4, 3] : []);
    context.beginPath();
    let on = false, alone = 0;
    for (let i = 0; i < xs.length; i++) {
      const y = this.py(ys[i]);
      if (y === null) { on = false; continue; }
      const x = this.px(xs[i]);
      if (on) context.lineTo(x, y);
      else {
        context.moveTo(x, y);
        if (this.py(ys[i + 1]) === null) { context.fillRect(x - 2, y - 2, 4, 4); alone++; }
      }
      on = true;
    }
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  about(px) {
    const wanted = this.xAt(px), lines = [];
    for (const one of this.series) {
      const at = nearest(one.x, wanted);
      if (at < 0) continue;
      if (!lines.length) lines.push(`${this.xLabel ?? "step"} ${(this.xText ?? short)(one.x[at])}`);
      lines.push(patch(colour(one.colour), `${one.label} ${short(one.y[at])}`));
    }
    return lines;
  }
}

/** The place of the value that is nearest in a sorted list; -1 of none. */
function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low < sorted.length ? low : -1;
}

/** Seconds of each step by phase, one above the other. `data` is an answer of /api/phases. */
class Bands extends Picture {
  extent() {
    const { data } = this;
    if (!data || !data.x.length) return null;
    this.edges = [...data.x, data.end];
    return { x: [data.x[0], data.end], y: [0, Math.max(...data.longest, 1e-6) * 1.05] };
  }

  paint() {
    const { context, data } = this, names = Object.keys(data.seconds);
    this.axes(seconds => `${short(seconds)} s`);
    const base = data.x.map(() => 0), gap = (this.px(this.edges[1]) - this.px(this.edges[0])) > 6 ? 1 : 0;
    names.forEach((name, number) => {
      context.fillStyle = colour(COLOURS[number]);
      data.x.forEach((x, i) => {
        const [left, right] = [this.px(x), this.px(this.edges[i + 1])], bottom = this.py(base[i]);
        base[i] += data.seconds[name][i];
        context.fillRect(left, this.py(base[i]), Math.max(0.5, right - left - gap), bottom - this.py(base[i]));
      });
    });
    context.fillStyle = colour("--ink");
    data.x.forEach((x, i) => { // of steps that are drawn as one, the longest
      if (data.longest[i] > base[i] * 1.02) context.fillRect(this.px(x), this.py(data.longest[i]), Math.max(1, this.px(this.edges[i + 1]) - this.px(x) - gap), 1.5);
    });
    if (finite(this.chosen)) {
      context.strokeStyle = colour("--ink");
      context.strokeRect(this.px(this.chosen), this.top, Math.max(2, this.px(this.chosen + 1) - this.px(this.chosen)), this.height - this.top - this.bottom);
    }
  }

  bucket(px) {
    const x = this.xAt(px);
    let i = this.data.x.length - 1;
    while (i > 0 && this.data.x[i] > x) i--;
    return i;
  }

  about(px) {
    const i = this.bucket(px), { data } = this, last = this.edges[i + 1] - 1;
    const lines = [last > data.x[i] ? `steps ${data.x[i]} to ${last}, mean; longest ${short(data.longest[i])} s` : `step ${data.x[i]}, ${short(data.longest[i])} s`];
    Object.entries(data.seconds).forEach(([name, values], number) => { if (values[i] > 0) lines.push(patch(colour(COLOURS[number]), `${name} ${short(values[i])} s`)); });
    return lines;
  }
}

/** Spans of each process; `data` is an answer of /api/lanes. */
class Lanes extends Picture {
  static ROW = 9;

  extent() {
    const { data } = this;
    if (!data) return null;
    return { x: this.zoom ?? [0, data.seconds * 1e3], y: [0, 1] };
  }

  /** Pixels that all rows need. */
  static height(data) { return data.roles.reduce((sum, role) => sum + Math.max(1, role.rows) * Lanes.ROW + 22, 28); }

  paint() {
    const { context, data, width, height } = this;
    Object.assign(this, { left: 8, right: 8, drawn: [] });
    context.textAlign = "center";
    for (const at of ticks(...this.range.x, Math.max(2, Math.floor(width / 110)))) {
      const x = Math.round(this.px(at)) + 0.5;
      context.fillStyle = colour("--line");
      context.fillRect(x, 0, 1, height - 18);
      context.fillStyle = colour("--soft");
      if (x > 20 && x < width - 20) context.fillText(`${short(at / 1e3)} s`, x, height - 5);
    }
    let top = 4;
    for (const role of data.roles) {
      context.textAlign = "left";
      context.fillStyle = colour("--ink");
      context.fillText(plain(role.role) + (role.hidden ? `   (${role.hidden} more rows are not shown)` : ""), this.left, top + 11);
      top += 15;
      for (const span of role.spans) this.span(span, top);
      top += Math.max(1, role.rows) * Lanes.ROW + 7;
    }
  }

  span(span, top) {
    const [row, name, start, length] = span, { context } = this, last = this.width - this.right;
    const from = Math.max(this.left, this.px(start)), to = Math.min(last, this.px(start + length)), y = top + row * Lanes.ROW;
    if (to < this.left || from > last) return;
    const wide = Math.max(1, to - from);
    context.fillStyle = this.colourOf(name);
    context.fillRect(from, y, wide, Lanes.ROW - 1.5);
    this.drawn.push([from, y, wide, span]);
  }

  /** Names are more than there are colours in the style; those of neighbours in the list are far apart. */
  colourOf(name) { return `hsl(${(212 + name * 137.5) % 360} 58% 54%)`; }

  about(px, py) {
    for (let i = this.drawn.length - 1; i >= 0; i--) {
      const [x, y, wide, [, name, start, length, known]] = this.drawn[i];
      if (px >= x - 1 && px <= x + wide + 1 && py >= y && py < y + Lanes.ROW) {
        return [patch(this.colourOf(name), plain(this.data.names[name])), `${short(length / 1e3)} s, from ${short(start / 1e3)} s on`, plain(known)];
      }
    }
    return [];
  }
}

/** Response length against reward, and groups by their least, mean and largest reward; a click opens the sample. */
class Dots extends Picture {
  extent() {
    const { dots } = this;
    if (!dots?.length) return null;
    const [xs, lows, highs] = [dots.map(d => d.x), dots.map(d => d.low ?? d.y), dots.map(d => d.high ?? d.y)];
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...lows), Math.max(...highs)];
    const [wide, high] = [(x1 - x0) * 0.04 || 1, (y1 - y0) * 0.08 || 0.5];
    return { x: [x0 - wide, x1 + wide], y: [y0 - high, y1 + high] };
  }

  paint() {
    const { context } = this;
    this.axes();
    for (const dot of this.dots) {
      const x = this.px(dot.x);
      context.fillStyle = context.strokeStyle = colour(dot.colour);
      context.globalAlpha = dot.low === undefined ? 0.45 : 0.9;
      if (dot.low !== undefined && dot.high > dot.low) context.fillRect(x - 1, this.py(dot.high), 2, this.py(dot.low) - this.py(dot.high));
      context.beginPath();
      context.arc(x, this.py(dot.y), Math.min(14, 2 + Math.sqrt(dot.count ?? 1)), 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  hit(px, py) {
    let best = null, least = 144;
    for (const dot of this.dots ?? []) {
      const far = (this.px(dot.x) - px) ** 2 + (this.py(dot.y) - py) ** 2;
      if (far < least) [best, least] = [dot, far];
    }
    return best;
  }

  about(px, py) { return this.hit(px, py)?.lines; }
  picked(px, py) { this.hit(px, py)?.open?.(); }
}
