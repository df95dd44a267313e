"""Clean and robust accuracy of a classifier on a whole set."""

import time

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from ..._files.progress import progress_bar
from .attack import Predict, at_rest
from .ensemble import ensemble_on, target_count
from .losses import cross_entropy
from .pgd import PGD
from .survivors import Aim, Crowd


def evaluate(
    predict: Predict,
    model: PyTree,
    images: Shaped[Array | np.ndarray, " N *pixels"],
    labels: Int[Array | np.ndarray, " N"],
    *,
    epsilon: float | Float[Array, ""],
    key: PRNGKeyArray,
    batch_size: int = 1000,
    pgd_steps: int = 50,
    restarts: int = 10,
    ensemble: bool = True,
    ensemble_steps: int = 100,
    progress: bool = False,
) -> dict:
    """Accuracies within `|d|_inf <= epsilon`, as shares of all images.

    - `clean`: without a perturbation.
    - `pgd`: at the ends of `restarts` climbs of PGD on cross-entropy, steps of
      `epsilon / 4`.
    - `ensemble`: under every attack of `robust_ensemble`, whatever PGD found.
    - `all`: under PGD and the ensemble.
    - `left`: how many images are left after each attack, by its name.
    - `seconds`: for `clean`, `pgd` and `ensemble`, compilation included.

    All robust ones count an image only if it is correct when clean, so none exceeds
    `clean`. Without the ensemble its entries are missing.

    Images are uint8, or floats in [0, 1], one label each. They are moved to the device
    once, and each round of attacks costs only what the rounds before have left. The
    same `key` gives the same numbers for every batch size, up to rounding.
    """
    if restarts < 1:
        raise ValueError(f"`restarts` is at least 1; got {restarts}.")
    crowd = Crowd(images, labels, batch_size)
    plain = Aim(predict, cross_entropy)
    everyone = np.ones(len(crowd), bool)
    for_pgd, for_ensemble = jax.random.split(key)
    result: dict = {"images": len(crowd)}
    left: dict[str, int] = {}
    seconds: dict[str, float] = {}
    rounds = 1 + restarts
    if ensemble:
        rounds += 1 + target_count(predict, model, crowd)

    with progress_bar(
        rounds * len(crowd), enabled=progress, description="attacked images"
    ) as advance:
        clock = _Clock(seconds)
        clean = crowd.strike(at_rest, plain, model, everyone, key=key, advance=advance)
        result["clean"] = float(clean.mean())
        left["clean"] = int(clean.sum())
        clock.stop("clean")

        climb = PGD(epsilon, steps=pgd_steps)
        alive = clean
        for restart in range(restarts):
            once = jax.random.fold_in(for_pgd, restart)
            alive = crowd.strike(climb, plain, model, alive, key=once, advance=advance)
            left[f"pgd{restart + 1}"] = int(alive.sum())
        result["pgd"] = float(alive.mean())
        clock.stop("pgd")

        if ensemble:
            found = ensemble_on(
                crowd, predict, model, clean,
                epsilon=epsilon, key=for_ensemble, steps=ensemble_steps,
                advance=advance,
            )  # fmt: skip
            result["ensemble"] = float(found.robust.mean())
            result["all"] = float((alive & found.robust).mean())
            left |= {name: n for name, n in found.left.items() if name != "clean"}
            clock.stop("ensemble")
    return result | {"left": left, "seconds": seconds}


class _Clock:
    """Seconds between stops."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds, self.since = seconds, time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.since = now - self.since, now
