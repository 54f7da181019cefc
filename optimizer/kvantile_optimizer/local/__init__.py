"""Everything on one machine: the fleet's processes, the replay of a trace, and the demo built from both."""
