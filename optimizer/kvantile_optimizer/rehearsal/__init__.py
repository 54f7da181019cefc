"""A plan replays itself before anybody runs it: `rehearse.rehearse` is the way in."""
