"""Integrity: every disagreement between rows and files, and its repair.

Owns verification, the repair of rows after it, and the repair of one damaged file.
It imports `checkpoints` and below, never another wing (catalogue, warm, exchange, collector, doctor).
"""
