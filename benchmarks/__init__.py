"""llama-ckpt compared with what people use today and with the least that a machine must do: one module a question, one runner.

`python -m benchmarks` measures, `python -m benchmarks report` publishes; `bars.toml` has what must be reached.
"""
