# SPDX-License-Identifier: Apache-2.0
"""Metrics: what the server counts and measures, in Prometheus's text form. Names and meanings of `vllm:` are vLLM's.

Not here: the engine's own counters, which are read from its stats when someone asks.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qwen_spmd.serve.request import FinishReason, Request

if TYPE_CHECKING:  # it imports jax
    from qwen_spmd.serve.engine import Stats

STEP_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Histogram:
    """Counts of values by bucket. Unlike the library's it takes many equal values at once: a decode window has them."""

    def __init__(self, help: str, bounds: Sequence[float]) -> None:
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, labels: dict[str, str]) -> HistogramMetricFamily:
        bounds = [*map(floatToGoString, map(float, self._bounds)), "+Inf"]
        family = HistogramMetricFamily(name, self.help, labels=list(labels))
        family.add_metric(list(labels.values()), list(zip(bounds, itertools.accumulate(self._counts))), self._sum)
        return family


class Metrics(Collector):
    """One server's. All of it belongs to the event loop's thread, so nothing is locked."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]) -> None:
        self._labels = {"model_name": model_name}
        self._stats = stats
        self._ended = collections.Counter[FinishReason]()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._histograms = {
            "vllm:time_to_first_token_seconds": Histogram("From arrival to the first token.", FIRST_S),
            "vllm:inter_token_latency_seconds": Histogram("Between two tokens of a request.", STEP_S),
            "vllm:request_time_per_output_token_seconds": Histogram("Mean of a request after its first token.", STEP_S),
            "vllm:e2e_request_latency_seconds": Histogram("From arrival to the end.", REQUEST_S),
            "vllm:request_queue_time_seconds": Histogram("From arrival to the first step.", REQUEST_S),
            "vllm:request_prefill_time_seconds": Histogram("From the first step to the first token.", REQUEST_S),
            "vllm:request_decode_time_seconds": Histogram("From the first token to the end.", REQUEST_S),
            "vllm:request_inference_time_seconds": Histogram("From the first step to the end.", REQUEST_S),
            "vllm:request_prompt_tokens": Histogram("Tokens of a request's prompt.", TOKENS),
            "vllm:request_generation_tokens": Histogram("Tokens that a request generated.", TOKENS),
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def tokens(self, request: Request, count: int, last: float, now: float) -> None:
        """`count` tokens came for a request, after others at `last`; 0 if they are its first."""
        if not count:
            return
        self._generation_tokens += count
        if last:
            # They came together, and the time is that of all of them.
            self._histograms["vllm:inter_token_latency_seconds"].add((now - last) / count, count)
        else:
            self._prompt_tokens += len(request.prompt)
            first = request.first_token or now
            self._histograms["vllm:time_to_first_token_seconds"].add(first - request.arrival)

    def ended(self, request: Request, reason: FinishReason, tokens: int, now: float) -> None:
        self._ended[reason] += 1
        scheduled, first, end = request.first_scheduled, request.first_token, request.finished or now
        if reason not in ("stop", "length") or scheduled is None or first is None:
            return  # how long it would have taken is unknown
        values = {
            "vllm:e2e_request_latency_seconds": end - request.arrival,
            "vllm:request_queue_time_seconds": scheduled - request.arrival,
            "vllm:request_prefill_time_seconds": first - scheduled,
            "vllm:request_decode_time_seconds": end - first,
            "vllm:request_inference_time_seconds": end - scheduled,
            "vllm:request_prompt_tokens": len(request.prompt),
            "vllm:request_generation_tokens": tokens,
        }
        if tokens > 1:
            values["vllm:request_time_per_output_token_seconds"] = (end - first) / (tokens - 1)
        for name, value in values.items():
            self._histograms[name].add(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # asked when registered, before there is anything to read

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        keys, values = list(self._labels), list(self._labels.values())
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", stats.running),
            "vllm:num_requests_waiting": ("Requests that wait for a place in it.", stats.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the KV pages in use, 1 is all.", stats.kv_usage),
            "qwen_spmd:recurrent_slot_usage_perc": ("Share of the recurrent slots in use, 1 is all.", stats.slot_usage),
            "qwen_spmd:rank_imbalance": (
                "Tokens of the busiest rank over the mean, averaged over steps.",
                stats.rank_imbalance,
            ),
            "qwen_spmd:expert_imbalance": (
                "Expert rows of this process's busiest device over the mean, of the last seconds.",
                stats.expert_imbalance,
            ),
            "qwen_spmd:step_age_seconds": ("Since the engine last made progress; 0 when idle.", stats.step_age_s),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(name, help, labels=keys)
            gauge.add_metric(values, value)
            yield gauge
        by_rank = GaugeMetricFamily(
            "qwen_spmd:rank_requests_running", "Requests in the batch, by rank.", labels=[*keys, "rank"]
        )
        for rank, running in enumerate(stats.running_by_rank):
            by_rank.add_metric([*values, str(rank)], running)
        yield by_rank
        by_rank = CounterMetricFamily(
            "qwen_spmd:rank_tokens", "Tokens computed in steps, by rank.", labels=[*keys, "rank"]
        )
        for rank, tokens in enumerate(stats.tokens_by_rank):
            by_rank.add_metric([*values, str(rank)], tokens)
        yield by_rank
        counters = {
            "vllm:num_preemptions": ("Requests that lost their place and started again.", stats.preemptions),
            "vllm:prompt_tokens": ("Prompt tokens computed.", self._prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", self._generation_tokens),
            "qwen_spmd:steps": ("Steps of the engine.", stats.steps),
            "qwen_spmd:step_tokens": ("Tokens computed in steps.", stats.scheduled_tokens),
            "qwen_spmd:padding_tokens": ("Tokens computed to fill a bucket.", stats.padding_tokens),
            "qwen_spmd:compiles": ("Programs compiled.", stats.compiles),
            "qwen_spmd:compiles_after_ready": ("Programs compiled while requests waited.", stats.compiles_after_ready),
        }
        for name, (help, value) in counters.items():
            counter = CounterMetricFamily(name, help, labels=keys)
            counter.add_metric(values, value)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=[*keys, "finished_reason"]
        )
        for reason in get_args(FinishReason):
            ended.add_metric([*values, reason], self._ended[reason])
        yield ended
        for name, histogram in self._histograms.items():
            yield histogram.family(name, self._labels)
