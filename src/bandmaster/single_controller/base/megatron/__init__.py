"""Megatron's workers and groups under their import path in verl up to 0.5."""
