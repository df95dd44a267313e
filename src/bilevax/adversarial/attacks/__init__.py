"""Attacks, and accuracy under them."""
