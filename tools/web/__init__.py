"""Pages that a tool serves to its own user."""
