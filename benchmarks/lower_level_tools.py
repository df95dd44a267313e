"""Gradients of the family of section 4.1 by bilevax and by other tools.

Each function gets the data and the points and returns `call(i)`, one gradient as a user
asks for it from Python, and `loop()`, all of them in the loop that is natural for the
tool; None where that is just `call` in a row. Tools are imported where they are used.
"""

import importlib
import importlib.metadata

import numpy as np

from .section_4_1 import Data


def bilevax(data, xs):
    """`hypergradient`; the loop is one jitted scan that hands on the warm start."""
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    Q1, Q2, A, B, b, _ = _in_jax(data)

    def upper(x, y):
        return x @ x + 0.1 * x @ (Q1 @ y) + y @ y + jnp.sum(x) + jnp.sum(y)

    def lower(x, y):
        return x @ x + x @ (Q2 @ y) + y @ y

    problem = bx.Problem(upper, lower, bx.Polyhedron(A, B, b))
    points = [jnp.asarray(x) for x in xs]
    stacked = jnp.asarray(xs)

    def call(i):
        return bx.hypergradient(problem, points[i]).grad.block_until_ready()

    def step(warm, x):
        e = bx.hypergradient(problem, x, warm=warm)
        return e.lower, e.grad

    start = bx.hypergradient(problem, points[0]).lower
    run = jax.jit(lambda start, xs: jax.lax.scan(step, start, xs)[1])
    return call, lambda: run(start, stacked).block_until_ready()


def numpy_daqp(data, xs):
    """What an expert writes by hand for this family.

    The loop keeps DAQP's workspace and active set, and what does not depend on `x`.
    """
    import daqp

    Q1, Q2, A, B, b, H = data

    def gradient(x, y, multipliers, solve_rows):
        f_y = 0.1 * Q1.T @ x + 2 * y + 1
        active = multipliers > 0
        rows = A[active]
        free, lifted, gram = solve_rows(f_y, active)
        w = np.linalg.solve(gram, rows @ free)
        v = free - lifted @ w
        return 2 * x + 0.1 * Q1 @ y + 1 - Q2 @ v - B[active].T @ w

    def from_scratch(f_y, active):
        rows = A[active]
        both = np.linalg.solve(H, np.column_stack([f_y, rows.T]))
        return both[:, 0], both[:, 1:], rows @ both[:, 1:]

    inverse = np.linalg.inv(H)
    lifted = inverse @ A.T
    gram = A @ lifted

    def prepared(f_y, active):
        return inverse @ f_y, lifted[:, active], gram[np.ix_(active, active)]

    def call(i):
        x = xs[i]
        y, _, flag, info = daqp.solve(H, Q2.T @ x, A, b - B @ x)
        assert flag == 1, f"DAQP: exit flag {flag}"
        return gradient(x, y, info["lam"], from_scratch)

    model = daqp.Model()
    model.setup(H, Q2.T @ xs[0], A, b - B @ xs[0])

    def warm_call(x):
        model.update(f=Q2.T @ x, bupper=b - B @ x)
        y, _, flag, info = model.solve()
        assert flag == 1, f"DAQP: exit flag {flag}"
        return gradient(x, y, info["lam"], prepared)

    return call, lambda: [warm_call(x) for x in xs]


def numpy_daqp_plain(data, xs):
    """The same by hand, one `daqp.solve` a point, nothing carried over."""
    return numpy_daqp(data, xs)[0], None


def qpax_default(data, xs):
    """`solve_qp_primal` with its defaults, jitted."""
    return _qpax(data, xs)


def qpax_sharp(data, xs):
    """The same with the smoothing of the gradient turned down."""
    return _qpax(data, xs, target_kappa=1e-10)


def qpax_sharpest(data, xs):
    """The same with the stopping tolerance turned down too."""
    return _qpax(data, xs, target_kappa=1e-10, solver_tol=1e-10)


def _qpax(data, xs, **options):
    import jax
    import jax.numpy as jnp
    import qpax

    Q1, Q2, A, B, b, H = _in_jax(data)
    none = jnp.zeros((0, len(H))), jnp.zeros(0)

    def value(x):
        y = qpax.solve_qp_primal(H, Q2.T @ x, *none, A, b - B @ x, **options)
        return x @ x + 0.1 * x @ (Q1 @ y) + y @ y + jnp.sum(x) + jnp.sum(y)

    gradient = jax.jit(jax.grad(value))
    points = [jnp.asarray(x) for x in xs]
    stacked = jnp.asarray(xs)

    def step(carry, x):
        return carry, jax.grad(value)(x)

    run = jax.jit(lambda xs: jax.lax.scan(step, None, xs)[1])
    return (
        lambda i: gradient(points[i]).block_until_ready(),
        lambda: run(stacked).block_until_ready(),
    )


def _in_jax(data):
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    # Or the compile times would be those of reading a file.
    jax.config.update("jax_enable_compilation_cache", False)
    return Data(*map(jnp.asarray, data))


def proxsuite(data, xs):
    """QPLayer with its defaults."""
    from proxsuite.torch.qplayer import QPFunction

    def solve(torch, H, p, A, c):
        none = torch.zeros(0, dtype=c.dtype)
        low = torch.full_like(c, -1e20)
        return QPFunction()(H, p, none, none, A, low, c)[0][0]

    return _torch(data, xs, solve)


def qpth(data, xs):
    """QPFunction, without its check of the eigenvalues of the Hessian."""
    from qpth.qp import QPFunction

    def solve(torch, H, p, A, c):
        none = torch.zeros(0, dtype=c.dtype)
        return QPFunction(verbose=-1, check_Q_spd=False)(H, p, A, c, none, none)[0]

    return _torch(data, xs, solve)


def cvxpylayers_default(data, xs):
    """CvxpyLayer with its defaults, canonicalised once."""
    return _cvxpylayers(data, xs)


def cvxpylayers_clarabel(data, xs):
    """The same with an interior-point solver."""
    return _cvxpylayers(data, xs, solver_args={"solve_method": "Clarabel"})


def _cvxpylayers(data, xs, **options):
    import cvxpy as cp
    from cvxpylayers.torch.cvxpylayer import CvxpyLayer

    k, n = data.A.shape
    y, p, c = cp.Variable(n), cp.Parameter(n), cp.Parameter(k)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(y) + p @ y), [data.A @ y <= c])
    layer = CvxpyLayer(problem, parameters=[p, c], variables=[y], **options)

    def solve(torch, H, p, A, c):
        return layer(p, c)[0]

    return _torch(data, xs, solve)


def _torch(data, xs, solve):
    """`call` for a layer `solve` that gives the minimiser of `y^T H y / 2 + p^T y`."""
    import torch

    Q1, Q2, A, B, b, H = (torch.tensor(part) for part in data)
    points = [torch.tensor(x) for x in xs]

    def call(i):
        x = points[i].clone().requires_grad_()
        y = solve(torch, H, Q2.T @ x, A, b - B @ x)
        value = x @ x + 0.1 * x @ (Q1 @ y) + y @ y + x.sum() + y.sum()
        return torch.autograd.grad(value, x)[0].numpy()

    return call, None


# Name, function, and the modules it needs.
TOOLS = {
    "bilevax": (bilevax, ("bilevax",)),
    "NumPy + DAQP": (numpy_daqp_plain, ("daqp",)),
    "NumPy + DAQP, workspace kept": (numpy_daqp, ("daqp",)),
    "qpax": (qpax_default, ("qpax",)),
    "qpax, kappa 1e-10": (qpax_sharp, ("qpax",)),
    "qpax, kappa, tol 1e-10": (qpax_sharpest, ("qpax",)),
    "proxsuite QPLayer": (proxsuite, ("torch", "proxsuite.torch.qplayer")),
    "qpth": (qpth, ("torch", "qpth.qp")),
    "cvxpylayers": (cvxpylayers_default, ("cvxpylayers.torch",)),
    "cvxpylayers, Clarabel": (cvxpylayers_clarabel, ("cvxpylayers.torch", "clarabel")),
}

JITTED = tuple(name for name in TOOLS if name.startswith(("bilevax", "qpax")))


def missing(name):
    """The first module of a tool that cannot be imported, or None."""
    for module in TOOLS[name][1]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return error.name or module
    return None
