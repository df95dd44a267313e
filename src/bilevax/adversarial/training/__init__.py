"""Training: the problem of each method, its settings, its run."""

from .training import Trained as Trained, score as score, train as train
