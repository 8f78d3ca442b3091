"""Rows that count users and hand out ring buffers, where a binary says who is a user.

Everything here is forced from below only: a variable may be larger than it must, and the objective keeps it small.
"""

from collections import Counter
from collections.abc import Sequence

from lazytrain.solver.linear import Affine, LinearModel, total


def add_counters(model: LinearModel, users: Sequence[Affine], depth: int) -> list[list[Affine]]:
    """Add variables c[k][m - 1] that are at least 1 where m or more of the users before k are used, m = 1..depth.

    c has one entry more than `users`: the last counts them all. A binary that was counted `depth` times (tied blocks
    share theirs) changes nothing any more.
    """
    counters = [[Affine() for _ in range(depth)]]
    times_seen: Counter[tuple[tuple[int, float], ...]] = Counter()
    for user in users:
        before, key = counters[-1], tuple(sorted(user.terms.items()))
        if user.is_zero or times_seen[key] >= depth:
            counters.append(before)
            continue
        times_seen[key] += 1
        after = []
        for m in range(depth):
            count = model.add_var(upper=1.0)
            if before[m].terms:
                model.add_at_least(count, before[m])
            model.add_at_least(count, user if m == 0 else before[m - 1] + user - 1.0)
            after.append(count)
        counters.append(after)
    return counters


def add_both(model: LinearModel, one: Affine, other: Affine) -> Affine:
    """Add a variable that is at least 1 where both are 1; 0 where one can't be."""
    if one.is_zero or other.is_zero:
        return Affine()
    both = model.add_var(upper=1.0)
    model.add_at_least(both, one + other - 1.0)
    return both


def add_product(model: LinearModel, one: Affine, other: Affine) -> Affine:
    """Add a variable that is 1 where both are 1, and 0 elsewhere: unlike `add_both` it is held from above too."""
    for a, b in ((one, other), (other, one)):
        if a.is_zero:
            return Affine()
        if not a.terms and a.constant == 1.0:
            return b
    product = model.add_var(upper=1.0)
    model.add_at_least(product, one + other - 1.0)
    model.add_at_most(product - one)
    model.add_at_most(product - other)
    return product


def add_odd(model: LinearModel, one: Affine, other: Affine) -> Affine:
    """Add a variable that is 1 where just one of the two is 1, and 0 elsewhere."""
    if one.is_zero or other.is_zero:
        return other if one.is_zero else one
    odd = model.add_var(upper=1.0)
    model.add_at_least(odd, one - other)
    model.add_at_least(odd, other - one)
    model.add_at_most(odd - one - other)
    model.add_at_most(odd + one + other, 2.0)
    return odd


def add_largest(model: LinearModel, parts: Sequence[Affine]) -> Affine:
    """Add a variable that is at least every part; 0 where there is nothing."""
    wanted = {tuple(sorted(part.terms.items())): part for part in parts if not part.is_zero}
    if not wanted:
        return Affine()
    largest = model.add_var()
    for part in wanted.values():
        model.add_at_least(largest, part)
    return largest


def add_buffer(
    model: LinearModel, users: Sequence[tuple[Affine, float]], exists: Sequence[Affine] | None = None
) -> Affine:
    """Add the size of as many equal buffers as exist, each of which holds the largest of its users.

    A binary for every size says whether anyone needs it: to decide on these first tells the relaxation what the buffers
    cost, which it would else take a fraction of.

    Args:
        users: (1 where it uses the buffers, size).
        exists: for each buffer, a binary that is 1 where it exists; None = one buffer, where there is a user.
    """
    wanted = [(user, size) for user, size in users if not user.is_zero]
    if not wanted:
        return Affine()
    needed: list[tuple[Affine, float]] = []
    for size in sorted({size for _, size in wanted}):
        need = model.add_var(binary=True, decide_first=True)
        for terms in {tuple(sorted(user.terms.items())): user for user, other in wanted if other == size}.values():
            model.add_at_least(need, terms)
        needed.append((need, size))
    if exists is None:
        return add_largest(model, [need * size for need, size in needed])
    buffers = []
    for there in exists:
        buffer = model.add_var()
        model.add_at_least(buffer, there * min(size for _, size in needed))
        for need, size in needed:
            model.add_at_least(buffer, (need + there - 1.0) * size)
        buffers.append(buffer)
    return total(buffers)


def add_counts(model: LinearModel, users: Sequence[Affine], counters: Sequence[Affine]) -> list[Affine]:
    """Add binaries that are 1 where at least 1, 2 ... users are there, above the final counters (see `add_counters`).

    A sum of users of which only fractions are there counts too: users <= m + (number - m)·count[m].
    """
    present = [user for user in users if not user.is_zero]
    counts = []
    for m, counter in enumerate(counters):
        if len(present) <= m:
            counts.append(Affine())
            continue
        count = model.add_var(binary=True, decide_first=True)
        model.add_at_least(count, counter)
        model.add_at_most(total(present) - count * (len(present) - m), float(m))
        counts.append(count)
    return counts


def add_ring(
    model: LinearModel,
    users: Sequence[Affine],
    finishes: Sequence[Sequence[Affine]],
    depth: int,
    horizon: float,
    *,
    period: Affine | None = None,
    in_order: bool = True,
) -> tuple[list[Affine], list[Affine]]:
    """Add, for each k, the time at which the buffer is free that the `depth`-th last user before k used.

        z[k + 1][1] >= finish[k] - M·(1 - user[k]),   z[k + 1][m] >= z[k][m - 1] - M·(1 - user[k]),   z[k + 1] >= z[k]

    Args:
        users: 1 where position k takes a buffer of the ring.
        finishes: per position, the times after which its buffer is free again (the latest counts).
        horizon: M, at least the latest finish.
        period: T, where users of the step before may still hold their buffers when a step begins.
        in_order: no user is done before one that came before it; else the last row holds where position k is none.

    Returns:
        The times, one per position; and, behind them, the times at which the last user, the last but one ...
        is done.
    """
    lower = 0.0 if period is None else -horizon
    first = [Affine() if period is None else model.add_var(lower, horizon) for _ in range(depth)]
    release, releases = first, []
    for user, ends in zip(users, finishes, strict=True):
        releases.append(release[-1])
        if user.is_zero:
            continue
        unless = (1.0 - user) * horizon
        newest = []
        for m in range(depth):
            sources = list(ends) if m == 0 else [release[m - 1]]
            sources = [source for source in sources if source.terms]
            if not sources and (in_order or not release[m].terms):
                newest.append(release[m])
                continue
            z = model.add_var(lower, horizon)
            for source in sources:
                model.add_at_least(z, source - unless)
            if release[m].terms:
                model.add_at_least(z, release[m] if in_order else release[m] - user * horizon)
            newest.append(z)
        release = newest
    if period is not None:
        for begin, end in zip(first, release):
            model.add_at_least(begin, end - period)
        if depth == 2:  # buffers take turns from the first one on: an odd last user leaves the one that comes first
            odd = Affine()
            for user in users:
                odd = add_odd(model, odd, user)
            model.add_at_least(first[-1], release[0] - period - (1.0 - odd) * (2 * horizon))
    return releases, release


def add_some(model: LinearModel, users: Affine, most: int) -> Affine:
    """Add a binary that is 1 where there is at least one user."""
    if users.is_zero:
        return Affine()
    some = model.add_var(binary=True)
    model.add_at_most(users - some * float(most))
    return some


def add_most(model: LinearModel, parts: Sequence[tuple[Affine, float]]) -> Affine:
    """Add a variable that is at most the largest value that has a user: unlike `add_largest` it is held from above."""
    parts = [(users, value) for users, value in parts if not users.is_zero]
    if not parts:
        return Affine()
    most = model.add_var(upper=max(value for _, value in parts))
    for limit in sorted({0.0, *(value for _, value in parts)})[:-1]:
        model.add_at_most(most - total(users * (value - limit) for users, value in parts if value > limit), limit)
    return most
