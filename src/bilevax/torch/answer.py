"""What a layer answers, and what it does about members without an answer."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import PyTree

from .._status import (
    BilevelError,
    Status,
    as_status,
    code_of,
    have_values,
    message,
    status_name,
)


class Answer(NamedTuple):
    """The followers' answers, one for each member of a batch.

    - `y`: tensors of the structure of `y`.
    - `prices`: the multipliers of all rows, inequalities first.
    - `status`: how each member ended. Members without an answer are masked in `y` and
      `prices`, and send no gradient back.
    """

    y: PyTree
    prices: Any
    status: Any

    @property
    def success(self) -> torch.Tensor:
        """Whether there is an answer, member by member: a mask for losses."""
        device = _device(self.prices)
        return torch.from_dlpack(have_values(self.status)).to(device)

    @property
    def status_name(self) -> Any:
        """The short name of the status; for a batch, an array of names."""
        return status_name(self.status)

    @property
    def message(self) -> str:
        """What is wrong or special, with the members it is about; else empty."""
        return message(self.status)


def _device(tree) -> torch.device:
    while not isinstance(tree, torch.Tensor):
        tree = next(iter(tree.values()))
    return tree.device


def checked_throw(throw) -> Any:
    if throw is True or throw is False or throw == "warn":
        return throw
    raise ValueError(
        '`throw` must be True (raise an error), "warn" (warn and mask) or False (mask '
        f"silently); got {throw!r}."
    )


def tell(answer: Answer, throw) -> None:
    """Raise or warn where some member has no answer."""
    if throw is False or bool(have_values(answer.status).all()):
        return
    # Kinks are answers.
    codes = np.asarray(code_of(answer.status))
    fine = np.asarray(have_values(answer.status))
    failures = message(as_status(np.where(fine, code_of(Status.successful), codes)))
    if throw is True:
        raise BilevelError(f"The layer failed. {failures}", answer.status, answer)
    warnings.warn(
        "The layer has no answer for some members: they are masked, and send no "
        f"gradient back. {failures}",
        stacklevel=6,
    )


def tell_of_adjoints(fine, throw) -> None:
    """Raise or warn where a derivative could not be computed."""
    if throw is False or bool(fine.all()):
        return
    which = [i for i, good in enumerate(fine.tolist()) if not good]
    text = (
        f"The derivative of the layer is left out for {len(which)} of {len(fine)} "
        f"members ({', '.join(map(str, which[:8]))}{', ...' * (len(which) > 8)}). "
        + Status[Status.adjoint_limit]
    )
    if throw is True:
        raise BilevelError(text, Status.adjoint_limit)
    warnings.warn(text, stacklevel=2)
