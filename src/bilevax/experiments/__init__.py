"""Experiments of the paper: rows first, figures from rows."""
