# SPDX-License-Identifier: Apache-2.0
"""Placements and their tables, copies of the hottest experts, load by rank. Moving weights: layers/test_moe.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_spmd.mesh.placement import NULL, Placement, balance, identity, imbalance


def placed(*layers):
    return Placement(np.array(layers))


def zipf(layers, experts, seed=0):
    """The n-th busiest expert has 1/n of the busiest one's rows, in an order of each layer's own."""
    rng = np.random.default_rng(seed)
    return np.stack([10_000 // rng.permutation(np.arange(1, experts + 1)) for _ in range(layers)])


def test_identity():
    p = identity(2, 3, 4)
    assert p.experts_LQ.tolist() == [[0, 1, 2, NULL]] * 2
    assert p.table(2).tolist() == [[[0, 0], [1, 1], [2, 2]]] * 2
    assert p.table(2).dtype == np.int32
    with pytest.raises(ValueError, match="places is 2, it must be at least the 3 experts"):
        identity(1, 3, 2)


def test_table():
    """Fewer copies than room are listed again, in turn."""
    p = placed([2, 0, 1, 2, NULL, 2], [0, 1, 2, 1, 0, NULL])
    assert p.copies_LE().tolist() == [[1, 1, 3], [2, 2, 1]]
    assert p.table(3).tolist() == [[[1] * 3, [2] * 3, [0, 3, 5]], [[0, 4, 0], [1, 3, 1], [2] * 3]]
    with pytest.raises(ValueError, match="copies is 2, an expert has 3 places"):
        p.table(2)


@pytest.mark.parametrize("layers", [[[0, 2, NULL]], [[0, 1], [1, 1]], [[NULL, NULL]], [0, 1]])
def test_every_expert_needs_a_place(layers):
    with pytest.raises(ValueError, match="every expert of every layer needs a place"):
        Placement(np.array(layers))


def test_loads():
    p = placed([2, 0, 1, 2, NULL, 2])
    assert p.load_LE(np.array([[5, 7, 1, 4, 9, 1]])).tolist() == [[7, 1, 10]]  # what a null place has counts nowhere
    assert p.load_LQ(np.array([[7, 1, 12]]), 3).tolist() == [[4, 7, 1, 4, 0, 4]]
    assert placed([0, 0]).load_LQ(np.array([[9]]), 3).tolist() == [[6, 3]]  # turns 0, 1, 0
    assert imbalance(np.array([[4, 0, 0, 0], [1, 1, 2, 0], [0, 0, 0, 0]]), 2).tolist() == [2, 1, 1]


def test_balance_lowers_the_busiest_ranks_share():
    """512 experts, 8 ranks, Zipf's law: what one rank has is nearly the mean; copies lower what one expert costs."""
    load_LE = zipf(2, 512)
    before = imbalance(identity(2, 512, 512).load_LQ(load_LE, 1), 8)
    spread = imbalance(balance(load_LE, 8, 512, 1).load_LQ(load_LE, 1), 8)
    copied = imbalance(balance(load_LE, 8, 544, 8).load_LQ(load_LE, 8), 8)
    assert np.all(before > 1.4) and np.all(spread < before) and np.all(copied < 1.05)
    wide = [imbalance(balance(load_LE, 64, p, a).load_LQ(load_LE, a), 64) for p, a in ((512, 1), (576, 8))]
    assert np.all(wide[0] > 8) and np.all(wide[1] < 1.6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_balance_is_a_placement(data):
    ranks, experts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    places = ranks * -(-(experts + data.draw(st.integers(0, 6))) // ranks)
    copies = data.draw(st.integers(1, 4))
    load_LE = np.array([data.draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts)) for _ in range(2)])
    p = balance(load_LE, ranks, places, copies)
    assert p.experts_LQ.shape == (2, places)
    assert p.copies_LE().min() >= 1 and p.copies_LE().max() <= min(copies, ranks)
    assert np.all(p.copies_LE()[load_LE == 0] == 1)
    load_LQ = p.load_LQ(load_LE, copies)
    np.testing.assert_allclose(load_LQ.sum(-1), load_LE.sum(-1))
    assert np.all(load_LQ[p.experts_LQ == NULL] == 0)
    table = p.table(copies)
    for l in range(2):
        for e in range(experts):
            assert sorted(set(table[l, e])) == np.flatnonzero(p.experts_LQ[l] == e).tolist()


def test_copies_are_on_different_ranks():
    p = balance(np.array([[100, 1, 1, 1, 1, 1]]), 4, 8, 3)
    assert p.copies_LE()[0, 0] == 3
    assert len(set(np.flatnonzero(p.experts_LQ[0] == 0) // 2)) == 3
    p = balance(np.array([[19, 20, 1]]), 2, 4, 2)  # the second half of 20 would fit better beside the first
    assert set(np.flatnonzero(p.experts_LQ[0] == 1) // 2) == {0, 1}


@pytest.mark.parametrize("places", [4, 10])
def test_refused_numbers_of_places(places):
    with pytest.raises(ValueError, match=f"places is {places}, it must be a multiple of 4 ranks and at least 8"):
        balance(np.ones((1, 8)), 4, places, 1)
