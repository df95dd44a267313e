"""Adversarial robustness of image classifiers as a bilevel problem."""
