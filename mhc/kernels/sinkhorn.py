"""Sinkhorn on `hc x hc` in the registers of one thread."""

import tilelang.language as T

# log v may yet move by FLAT, and eps be FORGETFUL, for the iterations left to count as linear: what those miss is of
# the order of the square of the one, 2^-22, and of the other's product with it
FLAT = 2.0**-11
FORGETFUL = 2.0**-14


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
    `a_i = sum_j K_ij v_j + eps a_i`. Only the factors change, so no element is rounded at every step, and an
    approximate reciprocal does no harm: the next step corrects it, and the last iteration's are exact.

    Once an iteration moves v by little, those left but the last are linear in log v: a product with one matrix each,
    no reciprocals. Where they turn out to move v too far for that they count for nothing, and it goes on as before.
    """
    hc = plan.config.hc_mult
    eps = plan.config.sinkhorn_eps
    iters = plan.config.sinkhorn_iters
    a = T.alloc_local((hc,), "float32")
    b = T.alloc_local((hc,), "float32")
    u = T.alloc_local((hc,), "float32")
    v = T.alloc_local((hc,), "float32")
    move = T.alloc_local((hc,), "float32")  # of log v, by an iteration or by all of those left
    size = T.alloc_local((1,), "float32")  # its largest element
    limit = T.alloc_local((1,), "float32")
    left = T.alloc_local((1,), "int32")
    for i in T.unroll(hc):
        a[i] = c[i * hc]
        for j in T.unroll(hc - 1):
            a[i] += c[i * hc + j + 1]
    for i in T.unroll(hc):
        # K = softmax(logits, rows) + eps, with a factor a row, which u takes back
        for j in T.unroll(hc):
            c[i * hc + j] += eps * a[i]
    invert(hc, "exactly" if iters == 1 else "in pairs", a, u)
    for j in T.unroll(hc):
        # c /= colsum(c) + eps
        b[j] = eps
    add_product(hc, c, u, b)
    invert(hc, "exactly" if iters == 1 else "in pairs", b, v)
    if iters > 2:
        left[0] = iters - 2
        limit[0] = FLAT / 2 if eps <= FORGETFUL else 0.0
        size[0] = 1.0
        while left[0] > 0:
            while size[0] > limit[0]:
                step(hc, eps, "in pairs", c, a, b, u, v, move)
                left[0] -= 1
                # beside the step's last reciprocals, which a condition of the loop would wait for
                size[0] = T.if_then_else(left[0] > 0, largest(move, 0, hc), 0.0)
            absorb(hc, c, a, b, u, v)
            add_up_the_rest(hc, c, left, move)
            size[0] = largest(move, 0, hc)
            for j in T.unroll(hc):
                # exp(move)
                v[j] = T.if_then_else(size[0] > FLAT, 1.0, 1.0 + (move[j] + 0.5 * move[j] * move[j]))
            left[0] = T.if_then_else(size[0] > FLAT, left[0], 0)
            limit[0] = limit[0] / 4
    if iters > 1:
        step(hc, eps, "exactly", c, a, b, u, v, move)
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            c[i * hc + j] = u[i] * c[i * hc + j] * v[j]


@T.macro
def step(hc, eps, how, c, a, b, u, v, move):
    """One iteration: c /= rowsum(c) + eps; c /= colsum(c) + eps. move = what it adds to log v, to first order."""
    for i in T.unroll(hc):
        a[i] = eps * a[i]
    for j in T.unroll(hc):
        for i in T.unroll(hc):
            a[i] = T.ieee_fmaf(c[i * hc + j], v[j], a[i])
    invert(hc, how, a, u)
    for j in T.unroll(hc):
        b[j] = eps * b[j]
    add_product(hc, c, u, b)
    for j in T.unroll(hc):
        move[j] = 1.0 - b[j] * v[j]
    invert(hc, how, b, v)


@T.macro
def add_product(hc, c, u, b):
    """b_j += sum_i c_ij u_i, in fused multiply-adds: the compiler would keep c_ij u_i, to use it again, and add."""
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            b[j] = T.ieee_fmaf(c[i * hc + j], u[i], b[j])


@T.macro
def invert(hc, how, a, u):
    """u = 1 / a: exactly, or in pairs that share a reciprocal, whose unit is the bottleneck.

    Exactly is to the last bit or its neighbour: a step of Newton's, without the branches of a division.
    """
    if how == "exactly":
        for i in T.unroll(hc):
            u[i] = T.fast_rcp(a[i])
        for i in T.unroll(hc):
            u[i] = u[i] + u[i] * (1.0 - a[i] * u[i])
    else:
        for i in T.unroll(hc // 2):
            pair = T.fast_rcp(a[2 * i] * a[2 * i + 1])
            u[2 * i] = pair * a[2 * i + 1]
            u[2 * i + 1] = pair * a[2 * i]
        if hc % 2 == 1:
            u[hc - 1] = T.fast_rcp(a[hc - 1])


@T.macro
def absorb(hc, c, a, b, u, v):
    """c = diag(u) c diag(v), so that factors and divisors are 1: fewer registers."""
    for j in T.unroll(hc):
        v[j] = v[j] + v[j] * (1.0 - b[j] * v[j])
    for i in T.unroll(hc):
        for j in T.unroll(hc):
            c[i * hc + j] = u[i] * c[i * hc + j] * v[j]
    for i in T.unroll(hc):
        a[i] = 1.0
        b[i] = 1.0
        v[i] = 1.0


@T.macro
def add_up_the_rest(hc, c, left, move):
    """move = (M + M^2 + ... + M^left) move: what `left` iterations add to log v after one that added `move`.

    A row step adds -c log v to log u and a column step -c^T log u to log v, to first order and where, as here, the rows
    and columns of c add up to 1; so M = c^T c. A factor of all of v is one of u: only how much more the others move
    than the first is followed, by N_jk = M_jk - M_0k.
    """
    n = T.alloc_local(((hc - 1) * (hc - 1),), "float32")
    more = T.alloc_local((hc - 1,), "float32")
    first = T.alloc_local((hc - 1,), "float32")
    total = T.alloc_local((hc - 1,), "float32")
    for q in T.unroll((hc - 1) * (hc - 1)):
        n[q] = 0.0
    for i in T.unroll(hc):
        for j in T.unroll(hc - 1):
            for k in T.unroll(hc - 1):
                n[k * (hc - 1) + j] += (c[i * hc + j + 1] - c[i * hc]) * c[i * hc + k + 1]
    for j in T.unroll(hc - 1):
        more[j] = move[j + 1] - move[0]
        first[j] = 0.0
    add_product(hc - 1, n, more, first)
    for j in T.unroll(hc - 1):
        more[j] = 0.0
    for _ in T.unroll(left[0], unroll_factor=1):  # more would spill in `quad`
        for j in T.unroll(hc - 1):
            total[j] = first[j]
        add_product(hc - 1, n, more, total)
        for j in T.unroll(hc - 1):
            more[j] = total[j]
    move[0] = 0.0
    for j in T.unroll(hc - 1):
        move[j + 1] = more[j]


def largest(values, start, count):
    """max |values[start : start + count]|, as a tree."""
    if count == 1:
        return T.abs(values[start])
    half = count // 2
    return T.max(largest(values, start, half), largest(values, start + half, count - half))
