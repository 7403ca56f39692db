"""The import paths of verl's ``single_controller``.

A notebook written for verl runs with ``verl`` replaced by ``bandmaster`` in its imports.
"""
