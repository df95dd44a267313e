"""A leader, a follower and a kink: solve, differentiate, and know when not to trust.

The leader sets a toll `x`; the follower answers with the flow `y` that balances a
quadratic travel cost against the toll, between zero and the capacity of the road. Where
the flow meets one of these limits, `F` has a kink.
"""

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import bilevax as bx

jax.config.update("jax_enable_x64", True)


def revenue(x, y):
    """The leader minimises minus the revenue."""
    return -jnp.sum(x * y)


def travel_cost(x, y):
    """The follower: benefit 4 per unit, congestion, and the toll."""
    return 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y)


def main():
    # Two roads: 0 <= y <= 1.5 on each and at most 2 together.
    roads = bx.Polyhedron(
        A=jnp.array([[-1.0, 0], [0, -1], [1, 0], [0, 1], [1, 1]]),
        b=jnp.array([0.0, 0, 1.5, 1.5, 2]),
    )
    problem = bx.Problem(revenue, travel_cost, roads)
    names = ("y1>=0", "y2>=0", "y1<=1.5", "y2<=1.5", "y1+y2<=2")

    table = Table(title="F(x) = -revenue along the first toll, second toll 3")
    for column in ("x", "F", "hypergradient", "active rows", "margin", "status"):
        table.add_column(column, justify="right")
    lower = None
    for toll in (1.0, 2.4, 2.5, 2.6, 3.0, 3.5, 4.0, 4.2):
        x = jnp.array([toll, 3.0])
        e = bx.hypergradient(problem, x, warm=lower, throw=False)
        lower = e.lower
        active = [name for name, on in zip(names, e.lower.active, strict=True) if on]
        table.add_row(
            f"({toll:.1f}, 3.0)",
            f"{e.value:.4f}",
            f"({e.grad[0]:+.4f}, {e.grad[1]:+.4f})",
            ", ".join(active) or "none",
            f"{e.margin:.1e}",
            bx.status_name(e.status),
        )
    console = Console(width=100)
    console.print(table)
    console.print(
        "At a kink the value is right, the gradient is that of one side, and the "
        "status says so."
    )

    # The follower's answer as a layer in somebody else's code.
    flow = jax.jacobian(lambda x: bx.solution_map(problem, x))(jnp.array([3.0, 3.0]))
    console.print(f"\nd(flow)/d(toll) at (3, 3), from solution_map:\n{flow}")


if __name__ == "__main__":
    main()
