"""The KV state of one sequence in llama.cpp's layout: parse, check, truncate, join, translate, compare. Pure.

Owns the layout and its edits. It imports nothing else of `formats` and does not depend on any file format.
"""
