"""Brings inputs through an engine: one, a batch, or what it generates; in one process of many, and with saves in the background.

Owns the decisions what is evaluated, who evaluates it, and when it is saved.
It imports `checkpoints` and below, never another wing (catalogue, exchange, integrity, collector, doctor).
"""
