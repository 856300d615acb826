"""Sharded models in other libraries' training loops; a module for each library, which it imports.

Nothing else in the package imports these modules.
"""
