"""A finite dual active-set method for strictly convex quadratic programs.

In the metric of the inverse Hessian (see `kkt.py`) the dual of the program is

    max_{mu >= 0 on inequalities}  <c, mu> - mu^T G mu / 2,

with `c` the violation of the rows at the unconstrained minimiser. Rows enter one at a
time, the most violated first, and leave when their multiplier would turn negative, so
the dual value rises strictly and the method ends. A violated row that depends on the
working set either replaces one of its rows or proves that the set of `y` is empty.
Written by hand because no JAX library has it; the idea is that of Goldfarb and Idnani
(1983).
"""

from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import placed, rows_of, which, xp
from .._programs.control import loop
from .._programs.modules import Plain
from .._tolerances import GIVES_WAY, tolerances
from .dense import BoolLike
from .kkt import root_solve, schur_root


class DualState(Plain):
    """Working set, its multipliers, and how the search stands.

    Where `infeasible`, the `ray` has `ray @ W = 0` and `<ray, c> > 0` (Farkas).
    """

    working: Bool[Array, " k"]
    mu: Float[Array, " k"]
    ray: Float[Array, " k"]
    infeasible: Bool[Array, ""]
    done: Bool[Array, ""]
    steps: Int[Array, ""]


def dual_active_set(
    gram: Float[Array, "k k"],
    conflict: Float[Array, " k"],
    usable: Bool[Array, " k"],
    equality: Bool[Array, " k"],
    enabled: BoolLike = True,
    guess: Float[Array, " k"] | None = None,
    rank: int | None = None,
) -> DualState:
    """Solve the dual program; `enabled=False` returns the start.

    `guess` holds multipliers of a similar program: the search starts from their rows,
    if these are independent, instead of none. `rank` bounds that of `gram`: factors
    are no larger, since working rows are independent.
    """
    k = gram.shape[0]
    max_steps = 20 * k + 100
    # One more than can be independent: rounding may tell late.
    most = k if rank is None else min(k, rank + 1)
    tol = tolerances(gram.dtype)
    index = xp.arange(k)
    one = xp.ones((), gram.dtype)
    floor = xp.where(equality, -xp.inf, xp.zeros_like(conflict))

    def body(s: DualState) -> DualState:
        solve = _working_solve(gram, s.working, most)
        target = solve(conflict)
        blocked = s.working & ~equality & (target < 0)

        # Towards the optimum of the working set, up to the first multiplier that
        # reaches zero.
        share = xp.where(blocked, s.mu / (s.mu - target), xp.inf)
        leaves = xp.argmin(share)
        partial = s.mu + xp.min(share) * (target - s.mu)
        partial = xp.where(index == leaves, 0, xp.maximum(partial, floor))

        # At that optimum: the most violated row enters (after many steps the first
        # one, which excludes cycles).
        violation = conflict - gram @ target
        size = xp.max(xp.abs(conflict), initial=0) + xp.max(xp.abs(target), initial=0)
        worth = xp.where(equality, xp.abs(violation), violation)
        worth = xp.where(usable & ~s.working, worth, -xp.inf)
        wanting = worth > k * tol.rounding * size
        enters = xp.where(
            s.steps < max_steps // 2, xp.argmax(worth), xp.argmax(wanting)
        )
        optimal = ~xp.any(wanting)
        sign = xp.where(violation[enters] < 0, -one, one)

        # Its part outside the span of the working set decides what entering means.
        shadow = solve(gram[enters])
        outside = gram[enters, enters] - gram[enters] @ shadow
        # As far as rounding can tell: `shadow` grows as the working set loses rank.
        dependent = outside <= tol.rounding * (1 + xp.sum(xp.abs(shadow))) ** 2
        gives_way = s.working & ~equality & (sign * shadow > GIVES_WAY * tol.dependent)
        ratio = xp.where(gives_way, target / (sign * shadow), xp.inf)
        replaced = xp.argmin(ratio)
        infeasible = dependent & ~xp.any(gives_way) & ~optimal
        length = xp.where(dependent & xp.any(gives_way), xp.min(ratio), 0)
        moved = target - length * sign * shadow
        moved = xp.where(index == enters, length * sign, moved)
        moved = xp.where(dependent & (index == replaced), 0, moved)
        moved = xp.maximum(moved, floor)
        entered = (s.working | (index == enters)) & ~(dependent & (index == replaced))

        any_blocked = xp.any(blocked)
        stop = ~any_blocked & (optimal | infeasible)
        return DualState(
            working=xp.where(
                any_blocked,
                s.working & (index != leaves),
                xp.where(stop, s.working, entered),
            ),
            mu=xp.where(any_blocked, partial, xp.where(stop, target, moved)),
            ray=xp.where(index == enters, sign, -sign * shadow),
            infeasible=~any_blocked & infeasible,
            done=stop,
            steps=s.steps + 1,
        )

    mu = xp.zeros(k, gram.dtype) if guess is None else guess
    mu = xp.where(usable & xp.isfinite(mu), xp.maximum(mu, floor), 0)
    if guess is not None and k:
        root = schur_root(gram, mu != 0, tol.eps)
        # One by one: a failed factor is NaN, which large reductions may lose.
        independent = xp.all(xp.diagonal(root) ** 2 > tol.dependent)
        mu = xp.where(independent, mu, 0)
    start = DualState(
        working=mu != 0,
        mu=mu,
        ray=xp.zeros(k, gram.dtype),
        infeasible=xp.asarray(False),
        done=xp.asarray(k == 0),
        steps=xp.asarray(0),
    )
    if k == 0:
        return start
    return loop(lambda s: enabled & ~s.done, body, start, limit=max_steps)


def _working_solve(gram, working, most: int):
    """`v -> G_SS^{-1} v_S` on the working set `S`, zero off it."""
    eps = tolerances(gram.dtype).eps
    if most == working.size:
        root = schur_root(gram, working, eps)
        return lambda v: root_solve(root, xp.where(working, v, 0))
    rows = which(working, most)
    inside = rows < working.size
    root = schur_root(rows_of(rows_of(gram, rows).T, rows), inside, eps)

    def solve(v):
        part = root_solve(root, xp.where(inside, rows_of(v, rows), 0))
        return placed(v, rows, part)

    return solve
