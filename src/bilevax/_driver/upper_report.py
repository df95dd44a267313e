"""What a solution says of upper constraints that involve `y`."""

from dataclasses import dataclass

from jaxtyping import Array, PyTree


@dataclass
class UpperReport:
    """What a solution says of its upper constraints.

    - `constraints`, `equalities`: `c` and `h` at `x`.
    - `multipliers`, `equality_multipliers`: in the same structures. If `c <= t` were
      allowed instead of `c <= 0`, `F` would fall by `multipliers` for each unit of `t`.
      NaN where the constraints are violated.
    - `violation`: the largest of `[c]_+` and `|h|`; `feasible`: whether each is below
      1e-8 of the size of its constraint (1e-3 in float32).
    - `residual`: an upper bound on the length of the shortest `F' + sum mu_j c_j'`,
      with gradients very near to `x`: zero where `x` is stationary.
    """

    constraints: PyTree[Array]
    equalities: PyTree[Array]
    multipliers: PyTree[Array]
    equality_multipliers: PyTree[Array]
    violation: float
    feasible: bool
    residual: float
