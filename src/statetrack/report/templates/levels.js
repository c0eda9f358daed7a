// One card per level: A, the old vector, B, the new vector, and the eigenvalues of A on the unit circle.

const SVG = "http://www.w3.org/2000/svg";
const RADIUS = 46;
const short = (x) => (Number.isInteger(x) ? String(x) : x.toFixed(2).replace(/^(-?)0\./, "$1."));
const colour = (x) => {
  const strength = Math.min(1, Math.abs(x)) * 0.62;
  return x === 0 ? "#fff" : x > 0 ? `rgba(0, 114, 178, ${strength})` : `rgba(213, 94, 0, ${strength})`;
};

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function cells(id, rows, columns, side, width) {
  const grid = element("div", { class: "grid", id });
  grid.style.gridTemplate = `repeat(${rows}, ${side}px) / repeat(${columns}, ${width}px)`;
  for (let i = 0; i < rows * columns; i++) grid.append(element("i"));
  return grid;
}

function fill(id, values, roomy, top) {
  const grid = at(id);
  values.forEach((x, i) => {
    const cell = grid.children[i];
    cell.style.backgroundColor = x === null ? "#fff" : colour(x);
    cell.textContent = x === null || !roomy ? "" : short(x);
    cell.title = x === null ? "" : String(x);
    cell.classList.toggle("top", i === top);
  });
}

function circle(i, n) {
  const [width, height] = [2 * RADIUS + 60, 2 * RADIUS + 22];
  const picture = svg("svg", { class: "unit", width, height, viewBox: `${-width / 2} ${-height / 2} ${width} ${height}`, role: "img", "aria-label": "eigenvalues" });
  picture.append(
    svg("circle", { r: RADIUS, fill: "none", stroke: "#9aa3ab" }),
    svg("line", { x1: -RADIUS - 8, x2: RADIUS + 8, y1: 0, y2: 0, stroke: "#e2e5e8" }),
    svg("line", { y1: -RADIUS - 8, y2: RADIUS + 8, x1: 0, x2: 0, stroke: "#e2e5e8" }),
    svg("text", { x: RADIUS + 5, y: 13 }, "1"),
    svg("text", { x: -RADIUS - 15, y: 13 }, "−1"),
  );
  for (let k = 0; k < n; k++) picture.append(svg("circle", { class: "dot", r: 5 }));
  picture.append(svg("g", { class: "times" }));
  return element("figure", { class: "circle upcoming", id: `circle-${i}` }, picture, element("figcaption", {}, "eigenvalues of A"));
}

function buildLevels() {
  at("levels").replaceChildren(
    ...network.levels.map((level, i) => {
      const n = level.size;
      const side = Math.max(5, Math.min(26, Math.floor((n > 9 ? 270 : 170) / n)));
      const figure = (id, caption, columns, width) =>
        element("figure", { class: /^[AB]-/.test(id) ? "upcoming" : "" }, cells(id, n, columns, side, width), element("figcaption", {}, caption));
      const sign = (text) => element("span", { class: "sign" }, text);
      const card = element("section", { class: n > 9 ? "card wide" : "card", id: `level-${i}` });
      card.append(
        element("h3", {}, level.name[0].toUpperCase() + level.name.slice(1)),
        element("div", { class: "note doing", id: `doing-${i}` }),
        element("div", { class: "equation" },
          figure(`A-${i}`, "A", n, side), sign("·"), figure(`old-${i}`, "h before", 1, 38), sign("+"),
          figure(`B-${i}`, "B", 1, 24), sign("="), figure(`h-${i}`, "h", 1, 38), circle(i, n)),
        element("div", { class: "note", id: `reading-${i}` }));
      return card;
    }),
  );
}

// `coming`: the letter is not read yet, so A and B are shown for it, and no result.
function drawLevel(i, level, now, letter, coming) {
  const n = level.size;
  const roomy = n <= 15;
  const blank = new Array(n).fill(null);
  const { action } = now;
  fill(`A-${i}`, action ? action.A.flat() : new Array(n * n).fill(null), n <= 8 || (n > 9 && n <= 12));
  fill(`old-${i}`, now.old ?? blank, roomy);
  fill(`B-${i}`, action ? action.B : blank, roomy);
  const current = action ? now.current : largest(level.H0);
  fill(`h-${i}`, coming ? blank : now.h, roomy, coming || !level.contains_states ? undefined : current);
  at(`level-${i}`).classList.toggle("coming", coming);
  const next = coming ? "No letter read yet: h is the start vector. Next: the" : "The";
  at(`doing-${i}`).textContent = action ? `${next} letter ${visible(alphabet[letter])} ${action.text}${context(i, level, now.symbol)}.` : "No letter read yet: h is the start vector.";
  at(`reading-${i}`).textContent = action && !coming ? reading(level, now) : "";
  drawCircle(i, action ? action.eigenvalues : []);
}

const braces = (states) => (states.length > 12 ? `${states.length} states` : `{${states.join(", ")}}`);

function context(i, level, symbol) {
  const sets = level.contexts[symbol];
  return sets === null || i === 0 ? "" : `; the levels above leave ${braces(sets[0])} before it and ${braces(sets[1])} after it`;
}

function reading(level, now) {
  const own = level.reads === "previous" ? `It was in ${now.reading} and is in ${now.current}.` : `Read off h: ${now.current}.`;
  return level.last ? `${own} That settles the automaton's state: ${now.output}.` : `${own} Both go on to the next level.`;
}

function drawCircle(i, eigenvalues) {
  const figure = at(`circle-${i}`);
  const angle = ([x, y]) => Math.atan2(y, x);
  const sorted = [...eigenvalues].sort((a, b) => angle(a) - angle(b) || a[0] - b[0]);
  figure.querySelectorAll(".dot").forEach((dot, k) => {
    const [x, y] = sorted[k] ?? [1, 0];
    dot.style.opacity = eigenvalues.length ? 1 : 0;
    dot.style.transform = `translate(${x * RADIUS}px, ${-y * RADIUS}px)`;
  });
  const counts = new Map();
  for (const [x, y] of sorted) {
    const key = `${x.toFixed(6)} ${y.toFixed(6)}`;
    counts.set(key, [x, y, (counts.get(key)?.[2] ?? 0) + 1]);
  }
  figure.querySelector(".times").replaceChildren(
    ...[...counts.values()].filter(([, , times]) => times > 1).map(([x, y, times]) =>
      svg("text", { x: x * RADIUS + 6, y: -y * RADIUS - 7 }, `×${times}`)));
}

start();
