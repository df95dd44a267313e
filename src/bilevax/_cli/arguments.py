"""Kinds of numbers on the command line; what is wrong with one is told by argparse."""

import argparse

from .._arguments import fraction


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text}")
    return int(text)


def positive(text: str) -> float:
    """A positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number, not {text}")
    return value


def ratio(text: str) -> float:
    """A number such as 0.03 or 8/255."""
    try:
        return fraction(text)
    except ValueError as error:
        # Of other errors argparse shows only that there was one.
        raise argparse.ArgumentTypeError(str(error)) from None
