"""Joins the ranks of a launcher or starts local ranks, and reports their failures."""
