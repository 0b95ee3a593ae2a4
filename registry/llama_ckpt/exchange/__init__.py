"""Exchange with other programs: adopt their files, export checkpoints for them, survey a folder.

Owns the reading of files that other programs wrote, and the writing of files for them.
It imports `checkpoints` and below, never another wing (catalogue, warm, integrity, collector, doctor).
"""
