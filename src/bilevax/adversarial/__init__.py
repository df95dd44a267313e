"""Adversarial training as a bilevel problem: networks, attacks, training, scores."""
