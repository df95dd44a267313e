"""Runs: steps, looks, starts, and what they leave behind."""
