"""The register center of verl up to 0.5 under its import path."""
