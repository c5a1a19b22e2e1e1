# SPDX-License-Identifier: Apache-2.0
"""Blocks: the one owner of a rank's KV pages and recurrent slots. Not here: who gets them (`scheduler.py`); the bytes.

A page or slot is free, or active: held by exactly one request, which lists it in `Request.pages` or `Request.slot`.
Two more states belong here once they exist: cached (held by nobody, content kept, evicted on demand) and in transfer.
Page 0 and slot 0 are null: padding reads and writes there, so they are in the counts and never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable

from qwen_spmd.serve.request import Request


class Blocks:
    """`num_pages` pages of `page_size` tokens and `num_slots` slots, the null ones included. All start free."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        least = {"num_pages": (num_pages, 2), "page_size": (page_size, 1), "num_slots": (num_slots, 2)}
        for name, (value, allowed) in least.items():
            if value < allowed:
                raise ValueError(f"{name} is {value}, it must be at least {allowed}")
        self.num_pages, self.page_size, self.num_slots = num_pages, page_size, num_slots
        # Stacks with the lowest on top: what was freed last, and is still warm, goes out first.
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(num_slots - 1, 0, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def page_usage(self) -> float:
        """Fraction of the pages in use, 0 to 1."""
        return 1 - self.free_pages / (self.num_pages - 1)

    @property
    def slot_usage(self) -> float:
        return 1 - self.free_slots / (self.num_slots - 1)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-tokens // self.page_size)

    def take_slot(self, request: Request) -> bool:
        """Give the request a slot unless it has one. False if none is free."""
        if not request.slot:
            if not self._free_slots:
                return False
            request.slot = self._free_slots.pop()
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Extend the request's pages to hold `tokens` tokens in all. False, and nothing taken, if too few are free."""
        need = self.pages_for(tokens) - len(request.pages)
        if need > len(self._free_pages):
            return False
        request.pages.extend(self._free_pages.pop() for _ in range(need))
        return True

    def release(self, request: Request) -> None:
        """Take back all that the request holds. Doing it again does nothing."""
        self._free_pages.extend(reversed(request.pages))
        request.pages.clear()
        if request.slot:
            self._free_slots.append(request.slot)
            request.slot = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raise RuntimeError unless every page and slot is free or held by one of these requests, exactly once."""
        requests = list(requests)
        pages = self._free_pages + [page for r in requests for page in r.pages]
        slots = self._free_slots + [r.slot for r in requests if r.slot]
        for name, found, count in (("page", pages, self.num_pages), ("slot", slots, self.num_slots)):
            if sorted(found) != list(range(1, count)):
                lost = sorted(set(range(1, count)) - set(found))
                extra = sorted({i for i in found if found.count(i) > 1 or not 0 < i < count})
                raise RuntimeError(f"{name}s that nobody has: {lost}; that two have, or that do not exist: {extra}")
