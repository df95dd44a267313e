"""DS-BLO with one of its parts switched off at a time."""

from dataclasses import replace

from .._methods.ds_blo import DSBLO


def ablations(method: DSBLO | None = None) -> dict[str, DSBLO]:
    """`method` (by default `DSBLO()`) and its ablations, by name.

    - "no q": the lower level is not tilted.
    - "one fixed q": one tilt for the whole run.
    - "no segment": gradients at the iterates, not between them.
    - "no momentum": `beta = 0`, each step along the last gradient alone.
    """
    method = DSBLO() if method is None else method
    return {
        "DS-BLO": method,
        "no q": replace(method, perturbation=None, first_tilt=0.0),
        "one fixed q": replace(method, fresh_tilt=False),
        "no segment": replace(method, segment=False),
        "no momentum": replace(method, beta=0.0),
    }
