"""Turns: groups that share slots use them one after the other. Everything is in `bandmaster.turns.turns`."""
