"""How late the event loop of a service was, from its own metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

LAG_METRIC = "sluice_loop_lag_seconds_bucket"


def lags(url: str) -> dict[float, float]:
    """Return the histogram of a service whose metrics are at this URL: how many samples were at most so late, by seconds."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - loopback
        text = answer.read().decode()
    return dict(_buckets(text))


def _buckets(text: str) -> Iterator[tuple[float, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == LAG_METRIC:
                yield float(sample.labels["le"]), sample.value


def lag_ms(before: Mapping[float, float], after: Mapping[float, float]) -> dict[str, float]:
    """Return median, 99th percentile and the longest lag between two histograms, in milliseconds."""
    between = {edge: count - before.get(edge, 0.0) for edge, count in after.items()}
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(quantile(between, share) * 1e3, 1) for name, share in shares.items()}


def quantile(cumulative: Mapping[float, float], share: float) -> float:
    """Return a quantile of a histogram, linear within its bucket. In the last bucket, which has no upper edge, return the lower edge."""
    wanted = share * max(cumulative.values())
    low = below = 0.0
    for edge in sorted(cumulative):
        count = cumulative[edge]
        if count >= wanted:
            if edge == float("inf") or count == below:
                return low
            return low + (edge - low) * (wanted - below) / (count - below)
        low, below = edge, count
    return low
