"""Five steps of DS-BLO on digits, for `test_sharding`; run as a program.

python five_steps.py OUT.npz [COORDINATOR PROCESSES PROCESS]
"""

import dataclasses
import sys

import jax
import numpy as np

from bilevax.adversarial.data.images import load_images
from bilevax.adversarial.training.devices import connect
from bilevax.adversarial.training.settings import Settings
from bilevax.adversarial.training.training import train


def main(out, coordinator=None, *place):
    jax.config.update("jax_enable_x64", True)
    if coordinator is not None:
        processes, process = map(int, place)
        connect(coordinator, processes, process)
    images = load_images("digits")
    few = dataclasses.replace(
        images, x_train=images.x_train[:40], y_train=images.y_train[:40]
    )
    settings = Settings(
        model="small",
        epsilon=0.1,
        epochs=1,
        batch_size=8,
        rate=0.5,
        schedule="constant",
        padding=1,
        flip=False,
        dtype="float64",
        activation="softplus",
    )
    trained = train(few, settings)
    if jax.process_index() == 0:
        leaves = jax.tree.leaves((trained.model, trained.average))
        loss = np.asarray(trained.history["loss"])
        np.savez(out, *map(np.asarray, leaves), loss=loss, devices=jax.device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
