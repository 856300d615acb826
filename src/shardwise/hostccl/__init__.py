"""Collectives between the CPUs of one host, and of several."""
