"""The life of a group's workers: what is checked first, construction, replacement, death watches, ownership and end."""
