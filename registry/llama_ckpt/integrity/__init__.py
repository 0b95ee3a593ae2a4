"""Integrity: disagreements between rows and files, and their repair.

Owns verification, the reconciliation of rows and files, and the repair of one damaged file.
It imports `checkpoints` and below, never another wing (catalogue, warm, exchange, collector, doctor).
"""
