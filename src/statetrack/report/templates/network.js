// A compiled network on one word: h = A h + B at every level, decoded level by level. The tables are those of
// statetrack.automata.export.network.

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const largest = (values) => values.reduce((best, x, i) => (x > values[best] ? i : best), 0);

class Network {
  constructor(spec, start) {
    this.levels = spec.levels;
    // one entry per letter read, and one for the start: the automaton's state and every level's vector
    this.history = [{ state: start, levels: spec.levels.map((level) => ({ h: level.H0 })) }];
  }

  get now() {
    return this.history[this.history.length - 1];
  }

  step(letter) {
    this.history.push(this.preview(letter));
  }

  // what a step would give
  preview(letter) {
    const before = this.now;
    let symbol = letter;
    let state = before.state;
    const levels = this.levels.map((level, i) => {
      const result = advance(level, before.levels[i].h, symbol);
      if (level.last) state = result.output;
      symbol = result.output;
      return result;
    });
    return { state, levels, letter };
  }

  back() {
    if (this.history.length > 1) this.history.pop();
  }
}

function advance(level, old, symbol) {
  const action = level.actions[level.action_of[symbol]];
  const h = action.B.map((b, row) => dot(action.A[row], old) + b);
  const row = largest(level.codebook.map((code, r) => dot(code, h) + level.bias[r]));
  const current = level.labels[row];
  const reading = level.reads === "previous" ? previous(action, h, current) : current;
  const table = level.table.length > 1 ? level.table[symbol] : level.table[0];
  return { h, old, symbol, action, current, reading, output: table[level.last ? row : reading] };
}

// After a reset h = e_target + h_old / 4; after a permutation the state before is the preimage.
function previous(action, h, current) {
  if (action.reset === null) return action.inverse[current];
  return largest(h.map((x, i) => (i === action.reset ? x - 1 : x)));
}

// A word as people type it: letters one after the other, or set apart by spaces, commas or dots.
function readWord(text, alphabet) {
  const order = alphabet.map((_, i) => i).sort((i, j) => alphabet[j].length - alphabet[i].length);
  const word = [];
  for (let at = 0; at < text.length; ) {
    const found = order.find((i) => text.startsWith(alphabet[i], at));
    if (found !== undefined) word.push(found);
    else if (!" ,.".includes(text[at])) return { word, problem: at };
    at += found === undefined ? 1 : alphabet[found].length;
  }
  return { word, problem: null };
}
