"""Time of an epoch of adversarial training, method by method, in one process.

    python -m benchmarks.adversarial_speed --data cifar10.npz [--model NAME]
        [--methods NAME ...] [--every N ...] [--cache FOLDER]

Prints a table of seconds per epoch beside clean training and AT, the passes through
the network that a step of DS-BLO needs with the time of each on its own, peak memory,
and the seconds to compile. Run twice with the same `--cache`, the second run shows
the seconds to load the same programs.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from bilevax.adversarial.data.images import load_images
from bilevax.adversarial.training.lower_level import AttackLoss, Linearised
from bilevax.adversarial.training.settings import Settings
from bilevax.adversarial.training.training import initial_model, train

METHODS = ("clean", "at", "ds-blo", "bilevel-sgd", "ssigd", "trades")


def epochs(images, settings: Settings) -> tuple[float, float]:
    """Seconds of an epoch, and how much longer the first one took."""
    rows = train(images, settings).rows
    seconds = [row["seconds"] for row in rows]
    usual = float(np.median(seconds[1:]))
    return usual, seconds[0] - usual


def timed(gradient, model, start, repeats: int = 20) -> float:
    """Milliseconds per evaluation of `gradient(model, delta)`.

    In one program, each evaluation starting from the last: sent one by one, the host
    would be slower than the device.
    """

    @eqx.filter_jit
    def chain(model, delta):
        def once(delta, _):
            parts = jax.tree.leaves(gradient(model, delta))
            touch = sum(jnp.sum(part) for part in parts)
            return delta + 1e-20 * touch, None

        return jax.lax.scan(once, delta, length=repeats)[0]

    jax.block_until_ready(chain(model, start))
    began = time.perf_counter()
    jax.block_until_ready(chain(model, start))
    return 1e3 * (time.perf_counter() - began) / repeats


def passes(images, settings: Settings) -> dict[str, float]:
    """Milliseconds of each pass at the batch size of the settings."""
    model = initial_model(images, settings)
    batch = jnp.asarray(images.x_train[: settings.batch_size], jnp.float32) / 255
    labels = jnp.asarray(images.y_train[: settings.batch_size])
    loss = AttackLoss(batch, labels)
    delta = 0.01 * jr.normal(jr.key(0), batch.shape)
    linear = Linearised(loss, delta, jnp.asarray(0.05))

    def mixed(model, v):
        along = lambda m: jax.jvp(lambda y: linear(m, y), (delta,), (v,))[1]
        return jax.grad(along)(model)

    return {
        "forward": timed(loss, model, delta),
        "gradient in the image": timed(jax.grad(loss, argnums=1), model, delta),
        "gradient in weights and image": timed(
            jax.grad(loss, argnums=(0, 1)), model, delta
        ),
        "mixed derivative": timed(mixed, model, delta),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="an npz file or a folder; none for digits")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="preact-resnet18")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument(
        "--every", type=int, nargs="+", default=[],
        help="also DS-BLO with the implicit term at one step in N",
    )  # fmt: skip
    parser.add_argument("--cache", help="folder for compiled programs")
    options = parser.parse_args()
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    images = load_images(options.dataset, options.data)
    found = {}
    wanted = [(method, 1) for method in options.methods]
    for method, every in [*wanted, *(("ds-blo", every) for every in options.every)]:
        settings = Settings(
            method=method,
            model=options.model,
            batch_size=options.batch_size,
            dtype=options.dtype,
            epochs=options.epochs,
            implicit_every=every,
        )
        name = method if every == 1 else f"{method}, one in {every}"
        found[name] = epochs(images, settings)
    print("| method | s / epoch | / clean | / AT | compile, s |")
    print("|---|---:|---:|---:|---:|")
    for method, (seconds, compiling) in found.items():
        ratios = [
            f"{seconds / found[name][0]:.2f}" if name in found else "–"
            for name in ("clean", "at")
        ]
        print(
            f"| {method} | {seconds:.2f} | {' | '.join(ratios)} | {compiling:.1f} |",
            flush=True,
        )
    memory = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in memory:
        print(f"\nPeak memory: {memory['peak_bytes_in_use'] / 2**30:.2f} GiB.")
    if "ds-blo" in found:
        steps = len(images.x_train) // options.batch_size
        settings = Settings(
            model=options.model, batch_size=options.batch_size, dtype=options.dtype
        )
        before = settings.attack.steps
        account(passes(images, settings), 1e3 * found["ds-blo"][0] / steps, before)


def account(each: dict[str, float], step: float, before: int) -> None:
    """Print the milliseconds of a step of DS-BLO beside those of its passes; `before`
    are the steps of its first attack."""
    print("\n| pass | ms |\n|---|---:|")
    for name, ms in each.items():
        print(f"| {name} | {ms:.2f} |")
    ideal = (
        (before + 1) * each["gradient in the image"]
        + each["gradient in weights and image"]
        + each["mixed derivative"]
    )
    print(f"\nA step of DS-BLO: {step:.2f} ms; its passes alone: {ideal:.2f} ms.")


if __name__ == "__main__":
    main()
