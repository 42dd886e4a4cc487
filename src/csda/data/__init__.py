"""Images: where they come from, how they are split, and their pixels."""
