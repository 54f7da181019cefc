"""Replays requests through simulated replicas: `replica` for one, `fleet` for a whole plan."""
