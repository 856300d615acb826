"""Entropies that are known in closed form."""

import math

import numpy as np
import pytest

from shardwise.train.baselines import measure_baselines


def test_a_text_of_one_byte_is_no_surprise() -> None:
    baselines = measure_baselines(np.full(1000, 65, dtype=np.uint8))
    assert baselines.uniform == pytest.approx(math.log(256))
    assert baselines.unigram == pytest.approx(0)
    assert baselines.bigram == pytest.approx(0)


def test_an_alternation_is_a_surprise_only_without_the_byte_before() -> None:
    baselines = measure_baselines(np.tile(np.array([1, 2], dtype=np.uint8), 5000))
    assert baselines.unigram == pytest.approx(math.log(2), abs=1e-6)
    assert baselines.bigram == pytest.approx(0, abs=1e-6)


def test_of_noise_the_byte_before_tells_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 4, size=200_000, dtype=np.uint8)
    baselines = measure_baselines(noise)
    assert baselines.unigram == pytest.approx(math.log(4), abs=1e-3)
    assert baselines.bigram == pytest.approx(math.log(4), abs=1e-3)


def test_the_last_byte_and_the_largest_pair_count() -> None:
    text = np.array([255, 255, 255, 0], dtype=np.uint8)
    # after 255: 255 twice and 0 once
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert measure_baselines(text).bigram == pytest.approx(expected)
