"""Comparisons with other engines, interleaved in one run, told as ratios of medians."""
