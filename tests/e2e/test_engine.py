# SPDX-License-Identifier: Apache-2.0
"""The loop with a real model: what a request gets depends on nothing but the request, and nothing is ever lost."""

import functools
import threading
import time

import pytest

from qwen_spmd.serve.engine import EngineStopped
from qwen_spmd.serve.scheduler import QueueFull


@pytest.fixture(scope="module")
def solo():
    """{id: (tokens, reason)} of the mixed requests, each alone in a fresh order; computed once."""
    return {}


def expected(solo, harness, mixed):
    if not solo:
        solo.update(harness(max_num_seqs=1).run(mixed(), together=False))
    return solo


# A tiny pool: the longest request needs 11 pages of 16.
@pytest.mark.parametrize("pages", [None, 12], ids=["large", "tiny"])
@pytest.mark.parametrize("seqs", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 5, 64])
def test_each_text_equals_its_solo_run(harness, mixed, solo, seqs, pages):
    want = expected(solo, harness, mixed)
    h = harness(max_num_seqs=seqs, max_num_batched_tokens=max(32, seqs), max_model_len=176, num_pages=pages)
    before = h.free()
    assert h.run(mixed()) == want
    assert h.free() == before
    stats = h.engine.stats()
    assert stats.compiles_after_ready == 0
    assert (stats.running, stats.waiting, stats.kv_usage, stats.slot_usage) == (0, 0, 0.0, 0.0)
    if pages and seqs > 1:
        assert stats.preemptions > 0


def test_preemption_on_several_ranks(harness, mixed, solo):
    want = expected(solo, harness, mixed)
    layout = {"dp": 2, "ep": 2, "tp": 2}
    h = harness(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=176, num_pages=48, **layout)
    before = h.free()
    assert h.run(mixed()) == want
    assert h.free() == before
    stats = h.engine.stats()
    assert stats.preemptions > 0 and stats.compiles_after_ready == 0
    assert min(stats.tokens_by_rank) > 0 and sum(stats.tokens_by_rank) == stats.scheduled_tokens


def test_solo_runs_have_all_endings(harness, mixed, solo):
    want = expected(solo, harness, mixed)
    assert {reason for _, reason in want.values()} == {"stop", "length"}
    assert len({tuple(tokens) for tokens, _ in want.values()}) > 40


def test_chunking_and_windows_change_nothing(harness, mixed, solo):
    want = expected(solo, harness, mixed)
    h = harness(max_num_batched_tokens=9, max_num_seqs=8, decode_window=1)
    assert h.run(mixed()) == want
    h = harness(max_num_batched_tokens=256, max_num_seqs=8, decode_window=16, block_size=64)
    assert h.run(mixed()) == want


def test_a_slot_keeps_nothing_of_its_last_tenant(harness, make_request):
    b = functools.partial(make_request, prompt=[5, 6], temperature=0.0, max_tokens=12)
    fresh = harness(max_num_seqs=1).run([b("b")])
    h = harness(max_num_seqs=1)
    h.run([make_request("a", list(range(100)), temperature=0.0, max_tokens=30)])
    assert h.run([b("b")]) == fresh


def test_arrivals_in_the_middle_change_nothing(harness, mixed, solo):
    want = expected(solo, harness, mixed)
    h = harness(max_num_seqs=5)
    for r in mixed():
        h.submit(r)
        time.sleep(0.002)
    assert h.wait(list(want)) == want


def test_aborts_everywhere_free_everything_and_touch_nobody(harness, mixed, solo):
    want = expected(solo, harness, mixed)
    h = harness(max_num_seqs=3, num_pages=12, max_model_len=176)
    before = h.free()
    requests = mixed()
    for r in requests:
        h.submit(r)
    victims = [r.id for r in requests[::3]]
    for id in victims:  # running ones and queued ones
        h.engine.abort(id)
        h.engine.abort(id)
    got = h.wait(list(want))
    assert {id: got[id] for id in want if id not in victims} == {id: want[id] for id in want if id not in victims}
    for id in victims:
        tokens, reason = got[id]
        assert reason in ("abort", want[id][1])
        assert tokens == want[id][0][: len(tokens)]
    assert h.free() == before


def test_abort_frees_within_two_steps(harness, make_request):
    h = harness()
    before = h.free()
    h.submit(make_request("long", [1, 2, 3], temperature=0.0, max_tokens=400))
    h.events.get(timeout=30)
    steps = h.engine.stats().steps
    h.engine.abort("long")
    assert h.free() == before
    h.wait(["long"])
    assert h.engine.stats().steps <= steps + 2
    assert h.engine.stats().running == 0


def test_queue_is_bounded(harness, make_request):
    h = harness(max_num_seqs=1, max_queue=2)
    h.submit(make_request("r", [1], temperature=0.0, max_tokens=300))
    h.events.get(timeout=30)
    for i in range(2):
        h.submit(make_request(f"w{i}", [1], max_tokens=1))
    with pytest.raises(QueueFull, match="max_queue"):
        h.submit(make_request("one too many", [1], max_tokens=1))
    h.wait(["r", "w0", "w1"])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [([], 4, "prompt"), ([1] * 600, 4, "max_len"), ([128], 4, "vocabulary has 128"), ([-1], 4, "prompt")],
)
def test_bad_requests_never_reach_the_loop(harness, make_request, prompt, max_tokens, match):
    h = harness()
    with pytest.raises(ValueError, match=match):
        h.submit(make_request("bad", prompt, max_tokens=max_tokens))
    assert h.engine.stats().steps == 0
    h.run([make_request("good", [1], max_tokens=2)])


def test_same_id_twice_is_refused(harness, make_request):
    h = harness()
    h.submit(make_request("x", [1], temperature=0.0, max_tokens=200))
    with pytest.raises(ValueError, match="'x' is in use"):
        h.submit(make_request("x", [2], max_tokens=1))
    h.wait(["x"])


def test_a_broken_step_ends_every_request_and_the_engine(harness, make_request, monkeypatch, caplog):
    h = harness()
    h.run([make_request("before", [1], max_tokens=2)])

    def fail(plan):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(h.engine._steps, "run", fail)
    for i in range(3):
        try:
            h.submit(make_request(f"r{i}", [1], max_tokens=2))
        except EngineStopped:
            h.ended[f"r{i}"] = "error"
    assert {reason for _, reason in h.wait(["r0", "r1", "r2"]).values()} == {"error"}
    assert "the device is gone" in h.engine.stats().error
    with pytest.raises(EngineStopped, match="the device is gone"):
        h.submit(make_request("later", [1], max_tokens=2))
    assert not h.engine.stats().alive or h.engine._thread.join(5) is None


def test_drain_finishes_what_runs_and_takes_nothing_new(harness, make_request):
    h = harness()
    h.submit(make_request("running", [1], temperature=0.0, max_tokens=200))
    drain = threading.Thread(target=h.engine.drain, args=(30,))
    drain.start()
    while True:
        try:
            h.submit(make_request(f"late{time.monotonic()}", [1], max_tokens=1))
        except EngineStopped:
            break
    tokens, reason = h.wait(["running"])["running"]
    assert (len(tokens), reason) == (200, "length")
    drain.join()
    assert not h.engine.stats().alive


def test_stop_ends_what_runs(harness, make_request):
    h = harness()
    h.submit(make_request("running", [1], temperature=0.0, max_tokens=400))
    h.events.get(timeout=30)
    h.engine.stop()
    assert h.wait(["running"])["running"][1] == "abort"
