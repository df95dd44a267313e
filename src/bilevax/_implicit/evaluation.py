"""What an evaluation of `F` says: of one follower, and of many."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._lower.base import LowerSolution
from .._problem.elastic import told as violations_told
from .._programs.modules import Plain
from .._status import as_status, have_values, message, status_name
from .quality import Quality


class Evaluation(Plain):
    """`F` at one `x`.

    - `value`, `grad`: NaN where the lower level has no answer.
    - `aux`: the auxiliary output of `upper`.
    - `lower`: the lower-level solution; pass it as `warm` to the next call.
    - `status`: one per batch member. At a kink the value is right and the gradient is
      that of one side.
    - `quality`: condition and bias, on demand.
    """

    value: Float[Array, ""]
    aux: Any
    grad: PyTree[Array]
    lower: LowerSolution
    status: Any
    quality: Quality | None

    @property
    def margin(self) -> Float[Array, ""]:
        """Distance to the nearest kink, in multiplier or slack of unit rows."""
        return self.lower.margin

    @property
    def weakly_active(self) -> Bool[Array, " k"]:
        """Rows that are tight with a multiplier of zero, to rounding."""
        return self.lower.weak

    @property
    def success(self) -> Bool[Array, ""]:
        """Whether `value` is right: at a kink, too, where `grad` is of one side."""
        return have_values(self.status)

    @property
    def message(self) -> str:
        """What is wrong or special here and what to do about it; else empty."""
        if np.ndim(self.status._value) or status_name(self.status) != "violated":
            return message(self.status)
        return f"{message(self.status)} {violations_told(self.lower.y)}"


class Each(NamedTuple):
    """What is known of the followers one by one.

    - `value`: their own `f_i(x, y_i)`, NaN where a follower has no answer; None where
      `upper` is one function of all answers.
    - `status`: how each one ended, as an evaluation of it alone would.
    - `others`: value and gradient of the mean over those followers that have an
      answer; where all have, these are those of `F`.
    """

    value: Float[Array, " followers"] | None
    status: Any
    others: tuple[Float[Array, ""], PyTree[Array]]

    @property
    def message(self) -> str:
        """What is wrong or special, with the followers it is about."""
        codes = np.asarray(self.status._value)
        if codes.ndim != 1:
            return message(self.status)
        lines = []
        for code in sorted(set(codes.tolist()) - {0}):
            which = np.flatnonzero(codes == code)
            shown = ", ".join(map(str, which[:8])) + ", ..." * (len(which) > 8)
            noun = "follower" if len(which) == 1 else "followers"
            kind = as_status(np.asarray(code))
            named = f"{noun.capitalize()} {shown} of {len(codes)}"
            lines.append(f"{named}: {status_name(kind)}. {message(kind)}")
        return "\n".join(lines)


class FollowersEvaluation(Evaluation):
    """`F` at one `x` over many followers.

    `lower` has a leading axis: one status, margin and active set for each. `status` is
    the gravest of theirs, and `message` names the followers it is about. Where one has
    no answer, `F` has no value, and `each` holds what is known of the others.
    """

    each: Each

    @property
    def margin(self) -> Float[Array, ""]:
        """The smallest of all followers that have an answer."""
        return jnp.nanmin(self.lower.margin)

    @property
    def message(self) -> str:
        return self.each.message or message(self.status)
