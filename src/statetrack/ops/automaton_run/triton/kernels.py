"""The run in one Triton kernel: a lane follows one word, so all of its look-ups are one launch."""

import triton
import triton.language as tl


@triton.jit
def run_automaton_kernel(table, letters, states, start, words, T, n, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    at = word.to(tl.int64) * T
    state = tl.zeros((BLOCK,), tl.int64) + start
    letter = tl.load(letters + at, mask=inside, other=0)
    t = 0
    while t < T:
        # the next letter does not wait for the state
        after = tl.load(letters + at + t + 1, mask=inside & (t + 1 < T), other=0)
        state = tl.load(table + letter * n + state, mask=inside, other=0)
        tl.store(states + at + t, state, mask=inside)
        letter = after
        t += 1
