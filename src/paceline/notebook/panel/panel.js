// The timelines of all ranks, to zoom into: Ctrl and the wheel zoom at the pointer (the
// wheel alone scrolls the page, as everywhere), dragging moves, a double click shows all.
// Draws what panel.py: drawn() tells. Loads nothing, and puts text in as text.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 64, HEAD = 18, TRACK = 18, FLIGHT = 8, GAP = 12, FOOT = 22;
const ROW = TRACK + FLIGHT + GAP;
const LETTER = 7; // at most this wide, so that labels can be kept apart
const HINT = "Ctrl + wheel zooms, dragging moves, a double click shows all";
const HIDDEN = "communication hidden", EXPOSED = "communication exposed";

function make(parent, name, attributes = {}, text = null) {
  const svg = name.startsWith("svg:");
  const node = svg ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function ms(ns) {
  const value = ns / 1e6;
  return value >= 9.95 ? value.toFixed(1) : value.toPrecision(3);
}

function legend(parent, told) {
  const line = make(parent, "div", { style: "font-size:12px;margin:4px 0" });
  for (const [kind, colour] of Object.entries(told.colours)) {
    const entry = make(line, "span", { style: "white-space:nowrap;margin-right:16px;display:inline-block" });
    const box = `display:inline-block;width:10px;height:10px;background:${colour};margin-right:5px`;
    make(entry, "span", { style: box });
    make(entry, "span", {}, told.labels[kind]);
  }
}

function table(parent, section) {
  const whole = make(parent, "table", { style: "font-size:12px;border-collapse:collapse;margin-top:4px" });
  section.table.forEach((row, place) => {
    const line = make(whole, "tr");
    row.forEach((text, column) => {
      const style = column === 0 ? "text-align:left;padding:2px 10px 2px 0" : "text-align:right;padding:2px 10px";
      make(line, place === 0 ? "th" : "td", { style }, text);
    });
  });
}

function ticks(begin, end) {
  const power = 10 ** Math.floor(Math.log10((end - begin) / 5));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size * 5 >= end - begin);
  const found = [];
  for (let tick = Math.ceil(begin / unit); tick * unit <= end; tick++) found.push(tick * unit);
  return found;
}

function chart(parent, section, told) {
  const all = section.rows.flatMap((row) => row.spans);
  const first = Math.min(...all.map((span) => span[1]));
  const whole = [0, Math.max(1, ...all.map((span) => span[2] - first))];
  let [begin, end] = whole;
  const height = HEAD + ROW * section.rows.length + FOOT;
  const style = `width:100%;max-width:900px;height:${height}px;display:block;touch-action:pan-y;cursor:grab`;
  const svg = make(parent, "svg:svg", { style, role: "img", "aria-label": "what each rank did" });
  const said = make(parent, "div", { style: "font-size:12px;line-height:1.4;opacity:0.75" }, HINT);
  const text = { "font-size": 12, "font-family": "system-ui, sans-serif", fill: "currentColor" };

  const width = () => Math.max(100, svg.clientWidth - LEFT);

  function row({ rank, spans }, top, x) {
    make(svg, "svg:text", { x: 0, y: top + 14, ...text }, `rank ${rank}`);
    const ground = { x: LEFT, y: top, width: width(), height: TRACK, fill: "currentColor", "fill-opacity": 0.08 };
    make(svg, "svg:rect", ground);
    for (const [kind, from, to, step, bucket] of spans) {
      const left = Math.max(LEFT, x(from - first)), right = Math.min(LEFT + width(), x(to - first));
      if (!(kind in told.colours) || right < left) continue;
      const bar = make(svg, "svg:rect", {
        x: left,
        y: kind === HIDDEN ? top + TRACK : top,
        width: Math.max(0.4, right - left),
        height: kind === HIDDEN ? FLIGHT : kind === EXPOSED ? TRACK + FLIGHT : TRACK,
        fill: told.colours[kind],
      });
      const which = bucket < 0 ? "" : `, bucket ${bucket}`;
      const words = `rank ${rank}, step ${step}: ${told.labels[kind]}${which}, ${ms(to - from)} ms`;
      bar.addEventListener("pointerenter", () => (said.textContent = words));
      bar.addEventListener("pointerleave", () => (said.textContent = HINT));
    }
  }

  function mark(x, y) {
    make(svg, "svg:path", { d: `M${x} ${y}v4`, stroke: "currentColor", "stroke-opacity": 0.5 });
  }

  // Where the steps of the first rank begin; a label that would touch the one before it is left out.
  function steps(x) {
    const begins = new Map();
    for (const [, from, , step] of section.rows[0].spans) {
      begins.set(step, Math.min(from - first, begins.get(step) ?? Infinity));
    }
    let free = 0;
    for (const [step, from] of begins) {
      const words = `step ${step}`, room = LETTER * words.length;
      if (from < begin || from > end) continue;
      mark(x(from), HEAD - 4);
      if (x(from) < free || x(from) + room > LEFT + width()) continue;
      make(svg, "svg:text", { x: x(from), y: HEAD - 6, "fill-opacity": 0.75, ...text }, words);
      free = x(from) + room + LETTER;
    }
  }

  function draw() {
    svg.replaceChildren();
    const x = (ns) => LEFT + ((ns - begin) / (end - begin)) * width();
    section.rows.forEach((one, place) => row(one, HEAD + place * ROW, x));
    steps(x);
    for (const tick of ticks(begin, end)) {
      const at = { x: x(tick), y: height - FOOT + 13, "text-anchor": "middle", ...text };
      mark(x(tick), height - FOOT - 4);
      if (x(tick) < LEFT + width() - 20) make(svg, "svg:text", at, `${+(tick / 1e6).toPrecision(6)} ms`);
    }
  }

  function show(from, length) {
    length = Math.min(Math.max(length, 1e3), whole[1]);
    begin = Math.min(Math.max(from, 0), whole[1] - length);
    end = begin + length;
    draw();
  }

  svg.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const share = (event.clientX - svg.getBoundingClientRect().left - LEFT) / width();
      const at = begin + share * (end - begin);
      const length = (end - begin) * (event.deltaY > 0 ? 1.25 : 0.8);
      show(at - share * length, length);
    },
    { passive: false },
  );
  let held = null;
  svg.addEventListener("pointerdown", (event) => (held = event.clientX));
  svg.addEventListener("pointermove", (event) => {
    if (held === null || !event.buttons) return;
    show(begin - ((event.clientX - held) / width()) * (end - begin), end - begin);
    held = event.clientX;
  });
  svg.addEventListener("pointerup", () => (held = null));
  svg.addEventListener("dblclick", () => show(...whole));
  const watcher = new ResizeObserver(draw);
  watcher.observe(svg);
  draw();
  return () => watcher.disconnect();
}

function render({ model, el }) {
  const told = model.get("told");
  const closes = told.sections.map((section) => {
    const part = make(el, "div", { style: "margin:4px 0 12px;padding:0 8px" });
    const name = told.sections.length > 1 ? `${section.name}: ` : "";
    make(part, "b", {}, name + section.verdict);
    legend(part, told);
    const close = chart(part, section, told);
    table(part, section);
    return close;
  });
  return () => closes.forEach((close) => close());
}

export default { render };
