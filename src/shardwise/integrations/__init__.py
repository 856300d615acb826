"""Sharded models in other libraries' training loops, with one module for each library.

Each module imports its library, so nothing else in the package imports these modules.
"""
