"""Sinkhorn on `hc x hc` in the registers of one thread."""

import tilelang.language as T

CLOSE = 2.0**-6  # Newton's error is the fourth power of a divisor's relative change


@T.macro
def sinkhorn(plan, c):
    """c[hc * hc] logits -> doubly stochastic, one thread a token."""
    hc = plan.config.hc_mult
    top = T.alloc_local((1,), "float32")
    for i in T.unroll(hc):
        top[0] = c[i * hc]
        for j in T.unroll(hc - 1):
            top[0] = T.max(top[0], c[i * hc + j + 1])
        for j in T.unroll(hc):
            c[i * hc + j] = T.exp(c[i * hc + j] - top[0])
    balance(plan, c)


@T.macro
def balance(plan, c):
    """c[hc * hc], exp(logits - the largest of their row) -> doubly stochastic.

    Kept as `diag(u) K diag(v)` with the divisors `a = 1 / u`, `b = 1 / v`: the step `c /= rowsum(c) + eps` is
    `a_i = sum_j K_ij v_j + eps a_i`. Only the factors change, so no element is rounded more than once, and an
    approximate reciprocal does no harm: the next step corrects it, and the last iteration's are exact. A divisor is a
    weighted mean, so its relative change never grows: once small, reciprocals follow by Newton's method from the last
    ones, sooner than the unit for them answers. Stops when two iterations together changed no bit of a divisor.
    """
    hc = plan.config.hc_mult
    eps = plan.config.sinkhorn_eps
    iters = plan.config.sinkhorn_iters
    a = T.alloc_local((hc,), "float32")
    b = T.alloc_local((hc,), "float32")
    u = T.alloc_local((hc,), "float32")
    v = T.alloc_local((hc,), "float32")
    old = T.alloc_local((2 * hc,), "float32")
    change = T.alloc_local((1,), "float32")
    moving = T.alloc_local((1,), "int32")
    for i in T.unroll(hc):
        # K = softmax(logits, rows) + eps
        a[i] = 0.0
        for j in T.unroll(hc):
            a[i] += c[i * hc + j]
    invert(hc, "exactly", a, u)
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            c[i * hc + j] = c[i * hc + j] * u[i] + eps
        a[i] = 1.0
        u[i] = 1.0
    for j in T.unroll(hc):
        # c /= colsum(c) + eps
        b[j] = eps
        for i in T.unroll(hc):
            b[j] += c[i * hc + j]
    invert(hc, "exactly", b, v)
    if iters > 2:
        if (iters - 2) % 2 == 1:
            step(hc, eps, "in pairs", c, a, b, u, v, change)
        change[0] = 1.0
        moving[0] = 1
        for _ in T.serial((iters - 2) // 2):
            if moving[0] != 0:
                for i in T.unroll(hc):
                    old[i] = a[i]
                    old[hc + i] = b[i]
                if change[0] > CLOSE:
                    step(hc, eps, "in pairs", c, a, b, u, v, change)
                    step(hc, eps, "in pairs", c, a, b, u, v, change)
                else:
                    step(hc, eps, "from the last", c, a, b, u, v, change)
                    step(hc, eps, "from the last", c, a, b, u, v, change)
                moving[0] = 0
                for i in T.unroll(hc):
                    if old[i] != a[i] or old[hc + i] != b[i]:
                        moving[0] = 1
    if iters > 1:
        step(hc, eps, "exactly", c, a, b, u, v, change)
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            c[i * hc + j] = u[i] * c[i * hc + j] * v[j]


@T.macro
def step(hc, eps, how, c, a, b, u, v, change):
    """One iteration: c /= rowsum(c) + eps; c /= colsum(c) + eps. change = the largest relative one of a divisor."""
    change[0] = 0.0
    for i in T.unroll(hc):
        a[i] = eps * a[i]
    for j in T.unroll(hc):
        for i in T.unroll(hc):
            a[i] += c[i * hc + j] * v[j]
    if how == "in pairs":
        largest_change(hc, a, u, change)
    invert(hc, how, a, u)
    for j in T.unroll(hc):
        b[j] = eps * b[j]
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            b[j] += c[i * hc + j] * u[i]
    if how == "in pairs":
        largest_change(hc, b, v, change)
    invert(hc, how, b, v)


@T.macro
def largest_change(hc, a, u, change):
    """change = max(change, |1 - a u|), u being the reciprocals of the last a."""
    for i in T.unroll(hc):
        change[0] = T.max(change[0], T.abs(1.0 - a[i] * u[i]))


@T.macro
def invert(hc, how, a, u):
    """u = 1 / a: exactly, in pairs that share a reciprocal, whose unit is the bottleneck, or from the last u.

    Exactly is to the last bit or its neighbour: a step of Newton's, without the branches of a division.
    """
    e = T.alloc_local((hc,), "float32")
    if how == "exactly":
        for i in T.unroll(hc):
            u[i] = T.fast_rcp(a[i])
        for i in T.unroll(hc):
            u[i] = u[i] + u[i] * (1.0 - a[i] * u[i])
    elif how == "in pairs":
        for i in T.unroll(hc // 2):
            pair = T.fast_rcp(a[2 * i] * a[2 * i + 1])
            u[2 * i] = pair * a[2 * i + 1]
            u[2 * i + 1] = pair * a[2 * i]
        if hc % 2 == 1:
            u[hc - 1] = T.fast_rcp(a[hc - 1])
    else:
        # 1 / a = u / (1 - e) = u (1 + e) (1 + e^2) ...
        for i in T.unroll(hc):
            e[i] = 1.0 - a[i] * u[i]
        for i in T.unroll(hc):
            u[i] = u[i] + u[i] * e[i]
            e[i] = e[i] * e[i]
        for i in T.unroll(hc):
            u[i] = u[i] + u[i] * e[i]
