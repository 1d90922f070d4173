"""The package's version, readable without importing anything heavy."""

__version__ = "0.1.0"
