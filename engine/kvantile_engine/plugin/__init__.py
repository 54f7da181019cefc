"""The scheduler for vLLM's `--scheduler-cls`: admission by reservation, waiting in slack order."""
