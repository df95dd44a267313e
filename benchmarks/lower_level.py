"""One hypergradient, next to other differentiable QP solvers, in one run.

Part 1 takes the problem family of section 4.1 of the paper,

    f = |x|^2 + 0.1 x^T Q1 y + |y|^2 + 1^T x + 1^T y,
    g = |x|^2 + x^T Q2 y + |y|^2   subject to   A y + B x <= b,

follows a path of points `x` on which the active set changes now and then, and measures
for every tool the time of one gradient of `F(x) = f(x, y*(x))` and its worst error
against a closed form in extended precision. Part 2 solves and differentiates a box
lower level with a million variables by products alone.

All of part 1 runs in one thread, part 2 in as many as there are cores. The tools are
imported where they are used: one that is missing gets a row that says so, and the
memory of each is measured in a process that loads nothing else.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.optimize import nnls

SIZES = "10,5 50,10 200,50"
# A tool that has used this many seconds at one size is repeated no further.
BUDGET_S = 15
# One thread for every library: on a shared machine threads wait for each other, some
# tools' more than others'.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
PACKAGES = (
    "bilevax", "jax", "numpy", "daqp", "proxsuite", "qpax", "qpth", "cvxpylayers",
    "diffcp", "cvxpy", "clarabel", "scs", "torch",
)  # fmt: skip


class Data(NamedTuple):
    """One problem of the family; `H` is the Hessian of `g` in `y`."""

    Q1: Any
    Q2: Any
    A: Any
    B: Any
    b: Any
    H: Any


def draw(n, k, seed=0):
    """The 'tight' instance: `b` is shifted by -2, so that rows are active."""
    rng = np.random.default_rng(seed)
    Q1, Q2 = rng.random((n, n)), rng.random((n, n))
    A, B = rng.random((k, n)), rng.random((k, n))
    return Data(Q1, Q2, A, B, rng.random(k) - 2, 2 * np.eye(n))


def path(n, count):
    """A closed curve around -0.5, long enough for rows to come and go."""
    t = np.arange(count)[:, None]
    return -0.5 + 0.5 * np.sin(0.1 * t + 2 * np.pi * np.arange(n) / n)


# The truth


def exact_gradient(data, x):
    """The gradient, the active rows and the margin to the nearest kink.

    The active rows come from a finite method (least distance by non-negative least
    squares) and are then verified by the signs of multipliers and slacks; the two
    linear systems are solved to extended precision.
    """
    long = Data(*(part.astype(np.longdouble) for part in data))
    x = x.astype(np.longdouble)
    p, c = long.Q2.T @ x, long.b - long.B @ x
    active = _active_rows(data, np.float64(p), np.float64(c))
    A, B = long.A[active], long.B[active]
    kkt = np.block([[long.H, A.T], [A, np.zeros((len(A), len(A)))]])
    n = x.size
    z = _refined_solve(kkt, np.concatenate([-p, c[active]]))
    y, multipliers = z[:n], z[n:]
    slack = (c - long.A @ y)[~active]
    margin = min(multipliers.min(initial=np.inf), slack.min(initial=np.inf))
    if margin <= 1e-12:
        raise RuntimeError(f"the active set is not verified: margin {margin:.1e}")
    f_y = 0.1 * long.Q1.T @ x + 2 * y + 1
    vw = _refined_solve(kkt, np.concatenate([f_y, np.zeros(len(A))]))
    grad = 2 * x + 0.1 * long.Q1 @ y + 1 - long.Q2 @ vw[:n] - B.T @ vw[n:]
    return np.float64(grad), active, float(margin)


def _active_rows(data, p, c):
    # `H = 2 I`, so with y = z - p/2 this is: the shortest z with A z <= h.
    h = c + data.A @ p / 2
    u, _ = nnls(np.vstack([-data.A.T, -h]), np.eye(len(p) + 1)[-1], maxiter=10**5)
    return u > 1e-12 * u.max(initial=1e-300)


def _refined_solve(matrix, rhs):
    inverse = np.linalg.inv(matrix.astype(float))
    z = np.zeros_like(rhs)
    for _ in range(6):
        z = z + inverse @ (rhs - matrix @ z).astype(float)
    return z


# The tools. Each function gets the data and the points and returns `call(i)`, one
# gradient as a user asks for it from Python, and `loop()`, all of them in the loop that
# is natural for the tool; None where that is just `call` in a row.


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


# Part 1


class Entry:
    """One tool at one size: its two ways to be called, and the best times so far.

    Times are pairs of CPU seconds of this process and wall seconds. In one thread they
    are the same on an idle machine; on a busy one the first is the fair one.
    """

    def __init__(self, name, data, xs):
        self.call, self.own_loop = TOOLS[name][0](data, xs)
        self.jitted = name in JITTED
        self.count = len(xs)
        self.grads = []
        self.first = _timed(lambda: self.grads.append(np.stack(self._loop())))[1]
        if self.own_loop is not None:
            self.grads.append(np.stack(self._calls()))
        self.cold = self.looped = np.full(2, np.inf)
        self.spent = 0.0

    def _calls(self):
        return [self.call(i) for i in range(self.count)]

    def _loop(self):
        return self._calls() if self.own_loop is None else self.own_loop()

    def measure(self):
        """Time every point once each way; the best of the repeats counts."""
        if self.spent > BUDGET_S:
            return
        looped = _timed(self._loop)
        cold = looped if self.own_loop is None else _timed(self._calls)
        self.looped = np.minimum(self.looped, looped / self.count)
        self.cold = np.minimum(self.cold, cold / self.count)
        self.spent += looped[1] + cold[1]

    def result(self, truth):
        norms = np.linalg.norm(truth, axis=1)
        wrong = [np.linalg.norm(g - truth, axis=1) / norms for g in self.grads]
        compiling = self.first - self.count * self.looped[1]
        return {
            "cold_us": 1e6 * self.cold[0],
            "loop_us": 1e6 * self.looped[0],
            "cold_wall_us": 1e6 * self.cold[1],
            "loop_wall_us": 1e6 * self.looped[1],
            "compile_s": compiling if self.jitted else 0.0,
            "worst_error": float(np.max(wrong)),
        }


def _timed(function):
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return np.array([time.process_time() - cpu, time.perf_counter() - wall])


def compare(n, k, points, repeats, advance):
    """All tools on one problem; a dictionary of results, ready for JSON."""
    data, xs = draw(n, k), path(n, points)
    exact = [exact_gradient(data, x) for x in xs]
    truth = np.stack([grad for grad, _, _ in exact])
    masks = np.stack([active for _, active, _ in exact])
    entries, results = {}, {}
    for name in TOOLS:
        advance(f"n={n}: {name}, first call")
        if module := missing(name):
            results[name] = {"note": f"not installed ({module})"}
            continue
        try:
            entries[name] = Entry(name, data, xs)
        except Exception as error:  # of any tool; the row says so
            results[name] = {"note": f"failed: {type(error).__name__}: {error}"}
    # Interleaved, so that a busy moment of the machine hits all tools.
    for repeat in range(repeats):
        for name, entry in entries.items():
            advance(f"n={n}: {name}, repeat {repeat + 1}")
            entry.measure()
    results |= {name: entry.result(truth) for name, entry in entries.items()}
    return {
        "n": n,
        "k": k,
        "points": points,
        "active_rows": [int(masks.sum(1).min()), int(masks.sum(1).max())],
        "active_set_changes": int(np.any(masks[1:] != masks[:-1], axis=1).sum()),
        "least_margin": min(margin for _, _, margin in exact),
        "tools": {name: results[name] for name in TOOLS},
    }


def size_table(result, memory):
    low, high = result["active_rows"]
    table = Table(
        title=f"n = {result['n']}, k = {result['k']}: {result['points']} points, "
        f"{low} to {high} active rows, {result['active_set_changes']} changes of the "
        f"active set, least margin {result['least_margin']:.0e}",
        caption="CPU time, best of the repeats. Ratios are to bilevax in the loop; "
        "errors are relative to the norm of the gradient. Memory: a process with this "
        "tool alone.",
    )
    table.add_column("tool")
    for column in ("cold us", "loop us", "cold ratio", "loop ratio", "worst error",
                   "compile s", "peak MB"):  # fmt: skip
        table.add_column(column, justify="right")
    base = result["tools"]["bilevax"].get("loop_us", np.nan)
    for name, row in result["tools"].items():
        if "note" in row:
            table.add_row(name, row["note"])
            continue
        table.add_row(
            name,
            f"{row['cold_us']:,.0f}",
            f"{row['loop_us']:,.1f}"
            if row["loop_us"] < 100
            else f"{row['loop_us']:,.0f}",
            f"{row['cold_us'] / base:,.1f}",
            f"{row['loop_us'] / base:,.1f}",
            f"{row['worst_error']:.0e}",
            f"{row['compile_s']:.1f}" if row["compile_s"] > 0.05 else "–",
            f"{memory[name]:,.0f}" if memory.get(name) else "–",
        )
    return table


# Memory


def peak_megabytes():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def memory_of(name, n, k):
    """Peak memory of a fresh process that uses one tool for three points."""
    out, _ = child("--memory-of", name, "--sizes", f"{n},{k}")
    return float(out) if out else None


def child(*options, env=None):
    """Run this script with `options`: its last line of output, or None and why."""
    command = [sys.executable, __file__, *options]
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    if out.returncode == 0:
        return out.stdout.splitlines()[-1], ""
    return None, (out.stderr.splitlines() or ["no message"])[-1]


def print_memory(name, n, k):
    call, loop = TOOLS[name][0](draw(n, k), path(n, 3))
    for i in range(3):
        call(i)
    if loop is not None:
        loop()
    print(peak_megabytes())


# Part 2


def large_box(n):
    """A chain of `n` springs between two walls each, by products alone."""
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)
    block = max(n // 1000, 1)

    def lower(x, y):
        stiffness = 1 + jnp.exp(jnp.repeat(x["log_stiffness"], block))[:n]
        chain = 0.5 * jnp.sum(stiffness * y**2) + jnp.sum((y[1:] - y[:-1]) ** 2)
        return chain - x["load"] @ y

    def upper(x, y):
        return 0.5 * jnp.sum((y - 0.5) ** 2) + 0.01 * jnp.sum(x["load"] ** 2)

    problem = bx.Problem(upper, lower, bx.Box(jnp.zeros(n), jnp.ones(n)))
    rng = np.random.default_rng(0)
    x = {
        "load": jnp.asarray(16 * rng.random(n) - 6),
        "log_stiffness": jnp.asarray(0.3 * rng.standard_normal(-(-n // block))),
    }
    d = jax.tree.map(lambda leaf: jnp.asarray(rng.random(leaf.shape)), x)

    def at(step, warm=None):
        moved = jax.tree.map(lambda a, b: a + step * b, x, d)
        began = time.perf_counter()
        e = jax.block_until_ready(bx.hypergradient(problem, moved, warm=warm))
        return e, time.perf_counter() - began

    e, first = at(0.0)
    h = 1e-6
    (up, later), (down, again) = at(h), at(-h)
    at(0.0, e.lower)
    _, warm = at(1e-3, e.lower)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), e.grad, d)))
    difference = (up.value - down.value) / (2 * h)
    return {
        "variables": n,
        "leaves_of_x": {name: leaf.size for name, leaf in x.items()},
        "active_bounds": int(e.lower.active.sum()),
        "status": bx.status_name(e.status),
        "rounds": int(e.lower.iterations.passes),
        "first_call_s": first,
        "later_call_s": min(later, again),
        "warm_call_s": warm,
        "kkt_residual": float(e.lower.kkt_residual),
        "slope": float(slope),
        "difference_error": float(abs(difference - slope) / abs(slope)),
        "peak_mb": peak_megabytes(),
    }


def box_in_child(n):
    """`large_box` in a process of its own, with all threads."""
    env = {name: v for name, v in os.environ.items() if name not in ONE_THREAD}
    out, why = child("--box-only", "--box", str(n), env=env)
    return json.loads(out) if out else {"note": f"failed: {why}"}


def box_table(box):
    if "note" in box:
        return f"The large box: {box['note']}"
    leaves = " and ".join(f"{v:,}" for v in box["leaves_of_x"].values())
    table = Table(
        title=f"A box with {box['variables']:,} variables, x with leaves of {leaves}",
        show_header=False,
    )
    rows = {
        "status": box["status"],
        "active bounds": f"{box['active_bounds']:,}",
        "rounds of the solver": f"{box['rounds']}",
        "first call, with compilation": f"{box['first_call_s']:.1f} s",
        "later call, cold start": f"{box['later_call_s']:.1f} s",
        "later call, warm start": f"{box['warm_call_s']:.1f} s",
        "KKT residual, relative": f"{box['kkt_residual']:.0e}",
        "slope against central difference": f"{box['difference_error']:.0e}",
        "peak memory of its process": f"{box['peak_mb']:,.0f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


# The command


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package)
        return getattr(module, "__version__", "not installed")


def sizes_of(text):
    return [tuple(map(int, pair.split(","))) for pair in text.split()]


def arguments():
    parser = argparse.ArgumentParser(description="One hypergradient, tool by tool.")
    parser.add_argument("--sizes", default=SIZES, help='pairs "n,k n,k"')
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--box", type=int, default=10**6, help="variables; 0 for none")
    parser.add_argument("--json", metavar="OUT", help="write all numbers to a file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--box-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    sizes = sizes_of(args.sizes)
    warnings.simplefilter("ignore")  # of other people's packages
    if args.box_only:
        return print(json.dumps(large_box(args.box)))
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        # Libraries read these when they are loaded, so start again.
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, os.environ | ONE_THREAD)
    # And one core: even a single thread of XLA hands its work on to another.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.memory_of:
        return print_memory(args.memory_of, *sizes[-1])
    began = time.perf_counter()
    console = Console(width=max(Console().width, 110))
    memory: dict[str, float | None] = {}
    results: list[dict[str, Any]] = []
    box = None
    total = len(TOOLS) * (1 + len(sizes) * (1 + args.repeats)) + bool(args.box)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(what):
            progress.update(task, advance=1, description=what)

        # First, while this process is small: a child starts with its parent's peak.
        for name in TOOLS:
            advance(f"memory: {name}")
            memory[name] = memory_of(name, *sizes[-1])
        for n, k in sizes:
            results.append(compare(n, k, args.points, args.repeats, advance))
            console.print(
                size_table(results[-1], memory if (n, k) == sizes[-1] else {})
            )
        if args.box:
            advance("the large box")
            box = box_in_child(args.box)
            console.print(box_table(box))
    report = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {package: version(package) for package in PACKAGES},
        "sizes": results,
        "peak_mb": memory,
        "box": box,
        "wall_s": time.perf_counter() - began,
    }
    versions = (f"{name} {number}" for name, number in report["versions"].items())
    console.print(f"Python {report['python']}, {', '.join(versions)}.")
    console.print(f"{report['cores']} cores, {report['wall_s']:.0f} s in all.")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
