"""Measurements of the shipped pair, or of any other target and heads; results are JSON with their provenance.

    python -m benchmarks NAME ...   one measurement; `--help` lists them, `NAME --help` its arguments
    python -m benchmarks --render   tables and documents from the results
    python -m benchmarks --check    fails if one of them is not what the results say

Run in the repository's root. A measurement exits with 1 if a text differs from plain `generate`'s that should not.
"""
