"""The KV state of one sequence, as llama.cpp lays it out: parse, check, cut, join, translate, compare. Pure functions of bytes.

Owns the layout and its edits. It imports nothing else of `formats`, and knows no file that a state may lie in.
"""
