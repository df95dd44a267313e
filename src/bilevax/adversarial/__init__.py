"""Adversarial training as a bilevel problem: networks, attacks, training, scores."""

from ._former import keep_former_paths as _keep_former_paths
from .attacks.apgd import apgd as apgd
from .attacks.ensemble import robust_ensemble as robust_ensemble
from .attacks.evaluate import evaluate as evaluate
from .attacks.pgd import pgd as pgd
from .data.images import Images as Images, load_images as load_images, split as split
from .files.export import export as export
from .networks.models import build as build
from .networks.network import AbstractNetwork as AbstractNetwork
from .training import Trained as Trained, score as score, train as train
from .training.settings import Settings as Settings
from .training.watch import predict as predict
from .training.weights import load_network as load_network

_keep_former_paths(__name__)
