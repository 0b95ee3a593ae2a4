"""Measurements on a real model: medians of interleaved runs, told as ratios to the floor of the same run."""
