"""
A robust classifier
===================

Adversarial training is a leader and followers, too: the leader chooses the weights of a
network, and every image has an adversary who changes its pixels within a small box.
This trains a small network on scikit-learn's digits, with attacks and without.
"""

# %%
# A few epochs are enough to see the difference. ``epsilon`` is the half-width of the
# box, in units of the pixel range.

import matplotlib.pyplot as plt
import numpy as np

from bilevax.adversarial import Settings, load_images, score as scored, train

images = load_images("digits")
common = dict(
    model="small", epsilon=0.15, epochs=6, batch_size=50, padding=0, flip=False
)
found = {}
for method in ("ds-blo", "clean"):
    trained = train(images, Settings(method=method, **common))
    scores = scored(
        trained.average, images, Settings(**common), ensemble=False, restarts=2
    )
    found[method] = trained
    print(f"{method:>7}: clean {scores['clean']:.1%}, attacked {scores['pgd']:.1%}")

# %%
# Accuracy on training images by epoch, clean and under attack.

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for method, trained in found.items():
    epochs = 1 + np.arange(len(trained.rows))
    axes.plot(epochs, [row["clean"] for row in trained.rows], label=f"{method}, clean")
    axes.plot(epochs, [row["robust"] for row in trained.rows], "--",
              label=f"{method}, attacked")  # fmt: skip
axes.set(xlabel="epoch", ylabel="accuracy", ylim=(0, 1))
axes.legend()
plt.show()

# %%
# For your own images: ``load_images("npz", FILE)``, or ``bilevax train --dataset npz
# --data FILE``; networks of your own are in the page on adversarial training.
