"""llama-ckpt beside what people use today and the floor of the machine: one module a question, one runner, ratios first.

`python -m benchmarks` measures, `python -m benchmarks report` publishes; `bars.toml` has what must be reached.
"""
