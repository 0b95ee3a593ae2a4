"""Brings inputs through an engine: one, a batch, or what it generates; in one process of many, and with saves in the background.

Owns the decisions what is evaluated (`warm`, `batch`), who evaluates it (`single_flight`), and when it is saved: `batch` starts
the saves that `background` runs in a thread, `autosave` saves while an engine generates.
It imports `checkpoints` and below, never another wing (catalogue, exchange, integrity, collector, doctor).
"""
