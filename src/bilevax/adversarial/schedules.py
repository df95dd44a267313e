"""Learning rates along a run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optax

SCHEDULES = ("triangular", "cosine", "piecewise", "constant")


def learning_rate(
    kind: str, peak: float, num_steps: int, peak_at: float = 0.4
) -> "optax.Schedule":
    """A rate per step.

    - "triangular": from zero up to `peak` at the share `peak_at` of the run, and down
      to zero at its end.
    - "cosine": up as before over the first tenth, then half a cosine down.
    - "piecewise": `peak`, a tenth of it from half of the run on, and a hundredth from
      three quarters on.
    - "constant".
    """
    import optax  # here, since it takes a while to import

    if kind == "triangular":
        top = max(1, round(peak_at * num_steps))
        rise = optax.linear_schedule(0.0, peak, top)
        fall = optax.linear_schedule(peak, 0.0, max(1, num_steps - top))
        return optax.join_schedules([rise, fall], [top])
    if kind == "cosine":
        warm = max(1, num_steps // 10)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm, num_steps)
    if kind == "piecewise":
        drops = {num_steps // 2: 0.1, 3 * num_steps // 4: 0.1}
        return optax.piecewise_constant_schedule(peak, drops)
    if kind == "constant":
        return optax.constant_schedule(peak)
    raise ValueError(f"no schedule {kind!r}; there are {', '.join(SCHEDULES)}.")
