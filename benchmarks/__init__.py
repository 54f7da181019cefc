"""Measurements of Kvantile; not part of the distribution."""
