const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const alphabet = data.dfa.alphabet;
const joint = alphabet.every((letter) => letter.length === 1) ? "" : " ";
let network;
let word = [];

const visible = (letter) => letter.replace(/\s/g, "␣").replace(/[\u0000-\u001f\u007f]/g, "·");
const position = () => network.history.length - 1;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The drawing keeps room for arrows it may not have: cut it to what is there, and let it grow to fit.
function cropPicture() {
  const picture = document.querySelector(".picture svg");
  const box = picture?.getBBox();
  if (!box?.width) return;
  const margin = 12;
  const [width, height] = [box.width + 2 * margin, box.height + 2 * margin];
  picture.setAttribute("viewBox", `${box.x - margin} ${box.y - margin} ${width} ${height}`);
  const scale = Math.min(1.5, 440 / height, 520 / width);
  picture.setAttribute("width", width * scale);
  picture.setAttribute("height", height * scale);
}

function start() {
  cropPicture();
  data.networks.forEach((spec, i) => at("network").append(element("option", { value: i }, spec.title)));
  alphabet.slice(0, 60).forEach((letter, i) => {
    const button = element("button", { "data-letter": i }, visible(letter));
    button.addEventListener("click", () => addLetter(i));
    at("letters").append(button);
  });
  at("first").addEventListener("click", () => goTo(0));
  at("back").addEventListener("click", () => goTo(position() - 1));
  at("step").addEventListener("click", () => goTo(position() + 1));
  at("last").addEventListener("click", () => goTo(word.length));
  at("word").addEventListener("input", () => setWord(at("word").value));
  at("network").addEventListener("change", () => {
    const here = position();
    restart();
    goTo(here);
  });
  for (const button of document.querySelectorAll("button.try")) {
    button.addEventListener("click", () => {
      at("word").value = button.dataset.word;
      setWord(button.dataset.word);
      goTo(word.length);
      at("controls").scrollIntoView({ block: "center" });
    });
  }
  // keys that step, except where they move within a text or a choice
  const keys = { ArrowLeft: () => position() - 1, ArrowRight: () => position() + 1, Home: () => 0, End: () => word.length };
  at("controls").addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select")) return;
    event.preventDefault();
    goTo(keys[event.key]());
  });
  const asked = new URLSearchParams(location.hash.slice(1));
  at("word").value = asked.get("word") ?? data.example;
  if (asked.has("network")) at("network").value = asked.get("network");
  setWord(at("word").value);
  goTo(Number(asked.get("at") ?? 0));
}

function setWord(text) {
  const read = readWord(text, alphabet);
  const cut = read.word.length > data.longest;
  word = read.word.slice(0, data.longest);
  at("problem").textContent =
    read.problem !== null
      ? `No letter begins at position ${read.problem}; the word ends there.`
      : cut ? `Only the first ${data.longest} letters are used.` : "";
  restart();
  draw();
}

function addLetter(i) {
  const text = at("word").value;
  at("word").value = text + (text && joint) + alphabet[i];
  const here = position();
  setWord(at("word").value);
  goTo(here === word.length - 1 ? word.length : here);
}

function restart() {
  network = new Network(data.networks[at("network").value], data.dfa.start);
  buildLevels();
}

// Forward by running the network, back by dropping what came after.
function goTo(target) {
  const goal = Math.max(0, Math.min(word.length, target || 0));
  while (position() > goal) network.back();
  while (position() < goal) network.step(word[position()]);
  const focused = document.activeElement;
  draw();
  // a button that can no longer be pressed loses the focus, at once in some browsers, and with it the keys
  if (focused.disabled) at("tape").focus({ preventScroll: true });
}

function automatonState() {
  const tables = alphabet.map((letter) => data.dfa.transitions[letter]);
  return word.slice(0, position()).reduce((state, letter) => tables[letter][state], data.dfa.start);
}

function draw() {
  const here = position();
  const { state } = network.now;
  const expected = automatonState();
  at("state").textContent = state;
  at("expected").textContent = expected;
  const accepting = data.dfa.accepting.includes(state);
  at("answer").textContent = accepting ? "accepting" : "not accepting";
  at("answer").className = accepting ? "badge yes" : "badge";
  at("agrees").textContent = state === expected ? "✓ the same" : "✗ different";
  at("agrees").className = state === expected ? "" : "wrong";
  at("place").textContent = `${here} of ${word.length} letters read`;
  for (const id of ["first", "back"]) at(id).disabled = here === 0;
  for (const id of ["step", "last"]) at(id).disabled = here === word.length;
  drawTape(here);
  drawPicture(here, state);
  // before the first step: what the first letter will do
  const coming = here === 0 && word.length > 0;
  const shown = coming ? network.preview(word[0]) : network.now;
  network.levels.forEach((level, i) => drawLevel(i, level, shown.levels[i], shown.letter, coming));
}

function drawTape(here) {
  const low = Math.max(0, here - 30);
  const cells = word.slice(low, low + 60).map((letter, k) => {
    const i = low + k;
    const kind = i === here - 1 ? "here" : i < here ? "read" : "";
    const cell = element("button", { class: kind, tabindex: -1, "aria-label": `step ${i + 1}: ${visible(alphabet[letter])}` }, visible(alphabet[letter]));
    cell.addEventListener("click", () => {
      goTo(i + 1);
      at("tape").focus({ preventScroll: true });
    });
    return cell;
  });
  if (low > 0) cells.unshift(element("i", {}, "…"));
  if (low + 60 < word.length) cells.push(element("i", {}, "…"));
  at("tape").replaceChildren(...(cells.length ? cells : [element("i", {}, "the empty word")]));
}

function drawPicture(here, state) {
  for (const old of document.querySelectorAll(".picture > svg .now, .picture > svg .taken")) old.classList.remove("now", "taken");
  document.getElementById(`state-${state}`)?.classList.add("now");
  if (here === 0) return;
  const from = network.history[here - 1].state;
  document.querySelector(`.picture .edge[data-from="${from}"][data-to="${state}"]`)?.classList.add("taken");
}
