"""The figures that the optimizer is held to, measured: `make bench-optimizer`, or `python -m benchmarks.optimizer`.

`table.ROWS` lists them; each row is a function in the module of its subject, run five times with a seed each.
"""
