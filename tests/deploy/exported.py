"""The series that a server really exports, from its own registry, for whatever names metrics.

Owns: names of series with the labels they have and the values that these take.
"""

from collections import defaultdict

from engine.frontend.metrics import EngineMetrics
from engine.types import ModelInfo, VisionFacts
from server.edge.observe.http_metrics import HttpMetrics
from tests.deploy.promql import Reads

INFO = ModelInfo(
    served_names=("model",),
    model_type="llama",
    weight_bytes=1,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    vocab_size=1,
    max_model_len=1,
    block_size=16,
    num_blocks=8,
    kv_cache_bytes=1,
    eos_token_ids=(),
    num_ranks=2,
    vision=VisionFacts(family="qwen3_vl", image_token_id=1, num_cache_tokens=1),
)
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod"})
"""Prometheus itself adds these."""
_FREE_LABELS = TARGET_LABELS | {"route", "status", "method", "model_name", "le"}
FROM_PROMETHEUS = frozenset({"up"})


def series() -> dict[str, dict[str, set[str]]]:
    """Values seen, by name and by label."""
    metrics = EngineMetrics("model", num_engines=2)
    HttpMetrics(metrics.registry).requests.labels("POST", "/v1/completions", "200", "").inc()
    for engine in range(2):
        metrics.model_is_ready(engine, INFO)
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            found[sample.name]  # one without labels is there too
    return found


def faults(reads: Reads, recorded: frozenset[str] = frozenset()) -> list[str]:
    """Faults of an expression: metrics and labels in it that are not exported."""
    known = series()
    wrong = []
    labels: set[str] = set(TARGET_LABELS)
    for selector in reads.selectors:
        if selector.metric in recorded | FROM_PROMETHEUS:
            continue
        if selector.metric not in known:
            wrong.append(f"no metric {selector.metric}")
            continue
        labels |= known[selector.metric].keys()
        for label, operator, value in selector.matchers:
            if label not in known[selector.metric].keys() | TARGET_LABELS:
                wrong.append(f"{selector.metric} has no label {label}")
            elif operator == "=" and label not in _FREE_LABELS and value not in known[selector.metric][label]:
                wrong.append(f"{selector.metric} never has {label}={value!r}")
    return wrong + [f"no label {label}" for label in sorted(reads.labels - labels)]
