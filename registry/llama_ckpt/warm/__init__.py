"""Inputs through an engine: one, a batch, in the background, while it generates; single flight over all processes.

Owns what is evaluated and when it is saved.
It imports `checkpoints` and below, never another wing (catalogue, exchange, integrity, collector, doctor).
"""
