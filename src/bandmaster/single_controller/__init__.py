"""The import paths of verl's ``single_controller``: a notebook written for it runs with one word replaced."""
