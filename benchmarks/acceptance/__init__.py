"""Measurements of acceptance, which do not depend on the machine."""
