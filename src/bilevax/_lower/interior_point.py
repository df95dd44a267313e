"""Primal–dual interior point for strongly convex `g`, with an active-set polish."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._programs.control import loop
from .._programs.modules import Plain
from .._tolerances import tolerances
from .active_set import ActiveSet, start
from .base import AbstractLowerSolver
from .dense import BoolLike, FlatLower, Rows


class InteriorPoint(AbstractLowerSolver):
    """Newton on the relaxed KKT conditions, `slack * multiplier = centre`.

    Starts from any `y`, feasible or not, and keeps slacks and multipliers positive. It
    delivers the active set; the Newton passes of `ActiveSet` then polish the point, so
    the result is as exact as there.
    """

    max_steps: int = 60
    polish: ActiveSet = ActiveSet()

    def __call__(self, problem, x, warm=None):
        begun = start(problem, x)
        lower, rows, y = begun.lower, begun.rows, begun.cold
        path = interior_path(
            lower,
            rows,
            problem.constraints.num_inequalities,
            y,
            self.max_steps,
            enabled=~rows.empty,
        )
        active = rows.usable & (rows.equality | (path.multipliers > path.slack))
        finite = jnp.all(jnp.isfinite(path.y)) & jnp.all(jnp.isfinite(path.multipliers))
        found = (
            jnp.where(finite, path.y, y),
            jnp.where(finite & active, path.multipliers, 0),
            jnp.where(finite, active, rows.equality & rows.usable),
        )
        return self.polish.solve_from(problem, x, begun, found, path.steps)


class Path(Plain):
    """A point of the interior path in unit rows."""

    y: Float[Array, " n"]
    slack: Float[Array, " k"]
    multipliers: Float[Array, " k"]
    done: Bool[Array, ""]
    steps: Int[Array, ""]


def interior_path(
    lower: FlatLower,
    rows: Rows,
    inequalities: int,
    y,
    max_steps: int,
    enabled: BoolLike,
):
    """Mehrotra's predictor and corrector with the Hessian at the current point.

    `inequalities`: how many of the rows come before the equations.
    """
    tol = tolerances(y.dtype)
    bounded = rows.usable & ~rows.equality
    fixed = rows.usable & rows.equality
    count = jnp.maximum(jnp.sum(bounded), 1)

    def residuals(p: Path):
        dual = lower.gradient(p.y) + p.multipliers @ rows.A
        primal = jnp.where(rows.usable, rows.A @ p.y + p.slack - rows.rhs, 0)
        return dual, primal

    def body(p: Path) -> Path:
        dual, primal = residuals(p)
        gap = jnp.sum(jnp.where(bounded, p.slack * p.multipliers, 0)) / count
        ratio = jnp.where(bounded, p.multipliers / p.slack, 0)
        hessian = lower.hessian(p.y)
        bent = hessian + (rows.A * ratio[:, None]).T @ rows.A
        root = jax.scipy.linalg.cho_factor(bent, lower=True)
        E = jnp.where(fixed[:, None], rows.A, 0)[inequalities:]

        def wanted(product):
            # slack * dmu + mu * dslack = product - slack * mu,  A dy + ds = -primal
            want = jnp.where(bounded, product / p.slack - p.multipliers, 0)
            want = want + ratio * primal
            return want, -dual - want @ rows.A

        # Together, because LAPACK calls must follow each other (see kkt.py).
        want, top = wanted(jnp.zeros_like(p.slack))
        solved = jax.scipy.linalg.cho_solve(root, jnp.column_stack([E.T, top]))
        lifted, free = solved[:, :-1], solved[:, -1]
        schur = E @ lifted
        usable = fixed[inequalities:]
        shift = jnp.where(usable, tol.regularise * (1 + jnp.max(schur, initial=0)), 1)
        schur_root = jax.scipy.linalg.cho_factor(schur + jnp.diag(shift), lower=True)

        def direction(want, free):
            nu = jax.scipy.linalg.cho_solve(
                schur_root, jnp.where(usable, E @ free + primal[inequalities:], 0)
            )
            dy = free - lifted @ nu
            ds = jnp.where(bounded, -primal - rows.A @ dy, 0)
            dmu = jnp.where(bounded, want + ratio * (rows.A @ dy), 0)
            return dy, ds, dmu.at[inequalities:].set(nu)

        def longest(ds, dmu):
            limit = jnp.minimum(
                jnp.where(bounded & (ds < 0), -p.slack / ds, jnp.inf),
                jnp.where(bounded & (dmu < 0), -p.multipliers / dmu, jnp.inf),
            )
            return jnp.minimum(1, 0.995 * jnp.min(limit, initial=jnp.inf))

        _, ds, dmu = direction(want, free)
        ahead = longest(ds, dmu)
        left = (p.slack + ahead * ds) * (p.multipliers + ahead * dmu)
        centre = (jnp.sum(jnp.where(bounded, left, 0)) / count / gap) ** 3 * gap
        centre = jnp.where(jnp.any(bounded), centre, 0)
        want, top = wanted(centre - ds * dmu)
        dy, ds, dmu = direction(want, jax.scipy.linalg.cho_solve(root, top))

        # A curved `g` can make the full step worse; halve until residuals shrink.
        def move(step):
            return Path(
                p.y + step * dy, p.slack + step * ds, p.multipliers + step * dmu,
                p.done, p.steps,
            )  # fmt: skip

        def size(q: Path):
            dual, primal = residuals(q)
            return jnp.linalg.norm(dual) + jnp.linalg.norm(primal)

        start, noise = size(p), tol.rounding * (1 + jnp.linalg.norm(p.multipliers))
        allowed = start + centre * count + noise
        step = loop(
            lambda t: ~(size(move(t)) <= allowed) & (t > 1e-8),
            lambda t: 0.5 * t,
            longest(ds, dmu),
            limit=27,
        )
        new = move(step)
        # In the units of the program: forces may be tiny, and lengths huge.
        dual, primal = residuals(new)
        force = jnp.linalg.norm(lower.gradient(new.y)) + tol.eps * first_force
        length = jnp.linalg.norm(new.y) + reach
        small = (
            (jnp.linalg.norm(dual) <= tol.accept * force)
            & (jnp.linalg.norm(primal) <= tol.accept * length)
            & (gap <= tol.accept * force * length)
        )
        broken = ~jnp.all(jnp.isfinite(new.y))
        return eqx.tree_at(
            lambda q: (q.done, q.steps), new, (small | broken, p.steps + 1)
        )

    first_force = jnp.linalg.norm(lower.gradient(y))
    reach = jnp.max(jnp.where(rows.usable, rows.scale, 0), initial=0)
    room = rows.rhs - rows.A @ y
    typical = 1 + jnp.max(jnp.abs(jnp.where(bounded, room, 0)), initial=0)
    start = Path(
        y=y,
        slack=jnp.where(bounded, jnp.maximum(room, 0.1 * typical), 0),
        multipliers=jnp.where(bounded, 1.0 + jnp.linalg.norm(lower.gradient(y)), 0),
        done=jnp.asarray(False),
        steps=jnp.asarray(0),
    )
    return loop(lambda p: enabled & ~p.done, body, start, limit=max_steps)
