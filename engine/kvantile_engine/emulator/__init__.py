"""An OpenAI-compatible server that behaves like one vLLM replica in time and memory, without a GPU.

`scheduler`, `blocks` and `steptime` are the engine: pure, stepped from outside, without a clock. `engine` runs them on
a virtual time line and hands tokens to `answers`; `requests` reads what clients send, `service` is the HTTP surface,
`metrics` and `history` are what can be observed. `cli` puts them together.
"""
