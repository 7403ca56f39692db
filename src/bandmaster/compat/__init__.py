"""Runs other libraries on bandmaster without changes to their code."""
