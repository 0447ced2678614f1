"""Adapters of programs that people really use: one module each, versions in ``versions.json``."""
