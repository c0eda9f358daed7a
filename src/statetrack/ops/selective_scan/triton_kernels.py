"""The selective scan in two Triton kernels: a program walks along time with the states of a few channels.

Nothing of size B T D N exists. The forward stores one state per L steps; the backward recomputes the states
of one stretch of L steps into a scratch of its own, which stays in cache, and walks back through it. Programs
are as many as the GPU runs at once, each taking one (sequence, channels) after the other, so the scratch does
not grow with the batch. Names as in `reference.py`; all arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _step_size(delta, bias, SOFTPLUS: tl.constexpr):
    """The step size and, for the backward, the value before the softplus."""
    raw = delta + bias
    if SOFTPLUS:
        return _softplus(raw), raw
    return raw, raw


@triton.jit
def _transition(step, A, EXTENDED: tl.constexpr):
    """a = exp(delta A) or 2 exp(delta A) - 1, and its derivative in delta A."""
    e = tl.exp(step[:, None] * A)
    if EXTENDED:
        return 2.0 * e - 1.0, 2.0 * e
    return e, e


@triton.jit
def forward_kernel(
    u, delta, A, B, C, D, z, bias, state, out, last, saved, batch, channels, T,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, out_b, out_d, out_t,
    B_b, B_n, B_t, C_b, C_n, C_t,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXTENDED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BD)
    item = tl.program_id(0)
    n = tl.arange(0, BN)
    while item < batch * blocks:
        b = (item // blocks).to(tl.int64)
        d = (item % blocks) * BD + tl.arange(0, BD)
        in_d, in_n = d < channels, n < N
        inside = in_d[:, None] & in_n[None, :]
        cell = d[:, None] * N + n[None, :]
        A_d = tl.load(A + cell, mask=inside, other=0.0).to(tl.float32)
        D_d, bias_d = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        if HAS_D:
            D_d = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias_d = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
        h = tl.zeros((BD, BN), tl.float32)
        if HAS_STATE:
            h = tl.load(state + b * channels * N + cell, mask=inside, other=0.0).to(tl.float32)
        t = 0
        while t < T:
            if SAVE & (t % L == 0):
                place = (b * tl.cdiv(T, L) + t // L) * channels * N
                tl.store(saved + place + cell, h, mask=inside)
            u_t_ = tl.load(u + b * u_b + d * u_d + t * u_t, mask=in_d, other=0.0).to(tl.float32)
            delta_t_ = tl.load(delta + b * delta_b + d * delta_d + t * delta_t, mask=in_d, other=0.0)
            B_t_ = tl.load(B + b * B_b + n * B_n + t * B_t, mask=in_n, other=0.0).to(tl.float32)
            C_t_ = tl.load(C + b * C_b + n * C_n + t * C_t, mask=in_n, other=0.0).to(tl.float32)
            step, _ = _step_size(delta_t_.to(tl.float32), bias_d, SOFTPLUS)
            a, _ = _transition(step, A_d, EXTENDED)
            h = a * h + (step * u_t_)[:, None] * B_t_[None, :]
            y = tl.sum(h * C_t_[None, :], axis=1) + D_d * u_t_
            if HAS_Z:
                z_t_ = tl.load(z + b * z_b + d * z_d + t * z_t, mask=in_d, other=0.0).to(tl.float32)
                y *= z_t_ / (1.0 + tl.exp(-z_t_))
            tl.store(out + b * out_b + d * out_d + t * out_t, y.to(out.dtype.element_ty), mask=in_d)
            t += 1
        tl.store(last + b * channels * N + cell, h, mask=inside)
        item += tl.num_programs(0)


@triton.jit
def backward_kernel(
    u, delta, A, B, C, D, z, bias, saved, scratch, dout, dlast, du, ddelta, dA, dB, dC, dD, dz, dstate,
    batch, channels, T,
    u_b, u_d, u_t, delta_b, delta_d, delta_t, z_b, z_d, z_t, dout_b, dout_d, dout_t,
    du_b, du_d, du_t, B_b, B_n, B_t, C_b, C_n, C_t,
    N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, L: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAST: tl.constexpr, SOFTPLUS: tl.constexpr,
    EXTENDED: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BD)
    item = tl.program_id(0)
    n = tl.arange(0, BN)
    own = tl.arange(0, BD)[:, None] * BN + n[None, :]
    scratch += tl.program_id(0).to(tl.int64) * L * BD * BN
    while item < batch * blocks:
        b = (item // blocks).to(tl.int64)
        block = (item % blocks).to(tl.int64)
        d = (item % blocks) * BD + tl.arange(0, BD)
        in_d, in_n = d < channels, n < N
        inside = in_d[:, None] & in_n[None, :]
        cell = d[:, None] * N + n[None, :]
        A_d = tl.load(A + cell, mask=inside, other=0.0).to(tl.float32)
        D_d, bias_d = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        if HAS_D:
            D_d = tl.load(D + d, mask=in_d, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias_d = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
        carried = tl.zeros((BD, BN), tl.float32)  # a_{t+1} g_{t+1}, first the last state's own gradient
        if HAS_LAST:
            carried = tl.load(dlast + b * channels * N + cell, mask=inside, other=0.0).to(tl.float32)
        dA_d = tl.zeros((BD, BN), tl.float32)
        dD_d = tl.zeros((BD,), tl.float32)
        stretch = tl.cdiv(T, L) - 1
        while stretch >= 0:
            start = stretch * L
            stop = tl.minimum(start + L, T)
            h = tl.load(saved + (b * tl.cdiv(T, L) + stretch) * channels * N + cell, mask=inside, other=0.0)
            t = start
            while t < stop:  # the states of this stretch once more
                tl.store(scratch + (t - start) * BD * BN + own, h)
                u_t_ = tl.load(u + b * u_b + d * u_d + t * u_t, mask=in_d, other=0.0).to(tl.float32)
                delta_t_ = tl.load(delta + b * delta_b + d * delta_d + t * delta_t, mask=in_d, other=0.0)
                B_t_ = tl.load(B + b * B_b + n * B_n + t * B_t, mask=in_n, other=0.0).to(tl.float32)
                step, _ = _step_size(delta_t_.to(tl.float32), bias_d, SOFTPLUS)
                a, _ = _transition(step, A_d, EXTENDED)
                h = a * h + (step * u_t_)[:, None] * B_t_[None, :]
                t += 1
            tl.debug_barrier()  # the scratch is read back below
            while t > start:
                t -= 1
                u_t_ = tl.load(u + b * u_b + d * u_d + t * u_t, mask=in_d, other=0.0).to(tl.float32)
                delta_t_ = tl.load(delta + b * delta_b + d * delta_d + t * delta_t, mask=in_d, other=0.0)
                B_t_ = tl.load(B + b * B_b + n * B_n + t * B_t, mask=in_n, other=0.0).to(tl.float32)
                C_t_ = tl.load(C + b * C_b + n * C_n + t * C_t, mask=in_n, other=0.0).to(tl.float32)
                dy = tl.load(dout + b * dout_b + d * dout_d + t * dout_t, mask=in_d, other=0.0).to(tl.float32)
                step, raw = _step_size(delta_t_.to(tl.float32), bias_d, SOFTPLUS)
                a, slope = _transition(step, A_d, EXTENDED)
                before = tl.load(scratch + (t - start) * BD * BN + own)
                if HAS_Z:
                    z_t_ = tl.load(z + b * z_b + d * z_d + t * z_t, mask=in_d, other=0.0).to(tl.float32)
                    y = tl.sum(h * C_t_[None, :], axis=1) + D_d * u_t_
                    gate = 1.0 / (1.0 + tl.exp(-z_t_))
                    dz_t_ = dy * y * gate * (1.0 + z_t_ * (1.0 - gate))
                    tl.store(dz + b * du_b + d * du_d + t * du_t, dz_t_.to(dz.dtype.element_ty), mask=in_d)
                    dy *= z_t_ * gate
                g = C_t_[None, :] * dy[:, None] + carried
                # sums over channels: one row per block of channels, added up afterwards in a fixed order
                place = ((block * batch + b) * T + t) * N + n
                tl.store(dC + place, tl.sum(h * dy[:, None], axis=0), mask=in_n)
                tl.store(dB + place, tl.sum(g * (step * u_t_)[:, None], axis=0), mask=in_n)
                dx = tl.sum(g * B_t_[None, :], axis=1)
                w = g * before * slope
                dA_d += w * step[:, None]
                dD_d += dy * u_t_
                dstep = dx * u_t_ + tl.sum(w * A_d, axis=1)
                if SOFTPLUS:
                    dstep *= 1.0 / (1.0 + tl.exp(-raw))
                here = b * du_b + d * du_d + t * du_t
                tl.store(du + here, (dx * step + D_d * dy).to(du.dtype.element_ty), mask=in_d)
                tl.store(ddelta + here, dstep.to(ddelta.dtype.element_ty), mask=in_d)
                carried = a * g
                h = before
            tl.debug_barrier()  # the next stretch overwrites the scratch
            stretch -= 1
        tl.store(dA + b * channels * N + cell, dA_d, mask=inside)
        tl.store(dD + b * channels + d, dD_d, mask=in_d)
        tl.store(dstate + b * channels * N + cell, carried, mask=inside)
        item += tl.num_programs(0)
