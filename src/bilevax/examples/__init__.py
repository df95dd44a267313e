"""Worked applications: `bilevax example` lists them, `bilevax example NAME` runs one.

Each is a script on its own, to be copied and changed.
"""
