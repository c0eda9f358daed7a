"""The run of an automaton: s_t = table[x_t, s_{t-1}], all steps of a word in one launch.

Grid: one program, a single warp, per BLOCK words. Registers: the state and the next letter of each word, one
word per lane.
"""

import triton
import triton.language as tl


@triton.jit
def run_automaton_kernel(table, letters, states, start, words, T, num_states, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    at = word.to(tl.int64) * T
    state = tl.zeros((BLOCK,), tl.int64) + start
    letter = tl.load(letters + at, mask=inside, other=0)
    t = 0
    while t < T:
        # prefetched: the next letter does not depend on the state
        next_letter = tl.load(letters + at + t + 1, mask=inside & (t + 1 < T), other=0)
        state = tl.load(table + letter * num_states + state, mask=inside, other=0)
        tl.store(states + at + t, state, mask=inside)
        letter = next_letter
        t += 1
