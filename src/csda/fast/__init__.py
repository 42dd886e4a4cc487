"""Everything that exists only for speed; the package works without it."""
