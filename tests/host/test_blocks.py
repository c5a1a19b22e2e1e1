# SPDX-License-Identifier: Apache-2.0
"""Blocks: what is handed out comes back, once. Not here: who gets it (`test_scheduler.py`)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_spmd.serve.blocks import Blocks
from qwen_spmd.serve.request import Request, SamplingParams


def a_request(name="a"):
    return Request(id=name, prompt=[1], params=SamplingParams(), max_len=2)


def test_null_page_and_slot_are_never_handed_out():
    blocks, r, s = Blocks(4, 2, 3), a_request(), a_request("s")
    assert (blocks.free_pages, blocks.free_slots) == (3, 2)
    assert blocks.grow(r, 6) and blocks.take_slot(r) and blocks.take_slot(s)
    assert sorted(r.pages) == [1, 2, 3] and {r.slot, s.slot} == {1, 2}
    assert (blocks.free_pages, blocks.free_slots) == (0, 0)


def test_grow_is_all_or_nothing():
    blocks, r = Blocks(4, 2, 2), a_request()
    assert blocks.grow(r, 3) and len(r.pages) == 2
    kept = list(r.pages)
    assert not blocks.grow(r, 7) and r.pages == kept and blocks.free_pages == 1
    assert blocks.grow(r, 2) and r.pages == kept, "fewer tokens take nothing and give nothing back"
    assert blocks.grow(r, 5) and r.pages[:2] == kept and len(r.pages) == 3


def test_pages_for_rounds_up():
    assert [Blocks(2, 4, 2).pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_second_slot_is_refused_or_the_same():
    blocks, r, s = Blocks(2, 1, 2), a_request(), a_request("s")
    assert blocks.take_slot(r) and blocks.take_slot(r) and r.slot == 1
    assert not blocks.take_slot(s) and s.slot == 0


def test_release_twice_frees_once():
    blocks, r = Blocks(4, 2, 2), a_request()
    assert blocks.grow(r, 4) and blocks.take_slot(r)
    for _ in range(2):
        blocks.release(r)
        assert (r.pages, r.slot, blocks.free_pages, blocks.free_slots) == ([], 0, 3, 1)
        blocks.check([])


def test_usage():
    blocks, r = Blocks(5, 1, 3), a_request()
    assert (blocks.page_usage, blocks.slot_usage) == (0, 0)
    blocks.grow(r, 1), blocks.take_slot(r)
    assert (blocks.page_usage, blocks.slot_usage) == (0.25, 0.5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r, s: r.pages.append(s.pages[0]),
        lambda r, s: r.pages.pop(),
        lambda r, s: r.pages.append(0),
        lambda r, s: r.pages.append(99),
        lambda r, s: setattr(r, "slot", s.slot),
        lambda r, s: setattr(r, "slot", 0),
    ],
    ids=["page of another", "lost page", "null page", "no such page", "slot of another", "lost slot"],
)
def test_check_sees(damage):
    blocks, r, s = Blocks(6, 1, 4), a_request(), a_request("s")
    for each in (r, s):
        assert blocks.grow(each, 2) and blocks.take_slot(each)
    blocks.check([r, s])
    damage(r, s)
    with pytest.raises(RuntimeError, match=r"(pages|slots) that nobody has"):
        blocks.check([r, s])


@pytest.mark.parametrize("sizes, name", [((1, 1, 2), "num_pages"), ((2, 0, 2), "page_size"), ((2, 1, 1), "num_slots")])
def test_sizes_are_checked(sizes, name):
    with pytest.raises(ValueError, match=f"{name} is {min(sizes)}, it must be at least"):
        Blocks(*sizes)


@settings(max_examples=50, deadline=None, database=None)
@given(
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(2, 4),
    st.lists(
        st.tuples(st.sampled_from(["grow", "take", "release"]), st.integers(0, 3), st.integers(0, 20)), max_size=40
    ),
)
def test_nothing_is_lost_or_shared(num_pages, page_size, num_slots, moves):
    blocks, requests = Blocks(num_pages, page_size, num_slots), [a_request(str(i)) for i in range(4)]
    for move, i, tokens in moves:
        r = requests[i]
        if move == "grow":
            fits = blocks.pages_for(tokens) - len(r.pages) <= blocks.free_pages
            assert blocks.grow(r, tokens) == fits
            assert not fits or len(r.pages) * page_size >= tokens
        elif move == "take":
            blocks.take_slot(r)
        else:
            blocks.release(r)
        blocks.check(requests)
    for r in requests:
        blocks.release(r)
    assert (blocks.free_pages, blocks.free_slots) == (num_pages - 1, num_slots - 1)
