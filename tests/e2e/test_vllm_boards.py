"""The queries of vLLM's boards and recipes, asked of a real Prometheus that scrapes a real server.

Owns: the list of what these boards read, as metrics and forms of queries.
Source: vLLM's boards for Grafana (the example, performance statistics, query statistics, KV cache, drafts),
and its recipes for KEDA, gateways and alerts.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import running_server, wait_for

PROMETHEUS = shutil.which("prometheus")
pytestmark = [pytest.mark.night, pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here")]
MODEL = "tokenyard-demo"
SELECTED = f'{{job="vllm", model_name=~"{MODEL}", instance=~".+", engine=~"0"}}'

QUANTILES = (
    *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_params_max_tokens", "request_params_n"),
    *("request_max_num_generation_tokens", "iteration_tokens_total", "request_prefill_kv_computed_tokens"),
)
"""Histograms: boards show quantiles, means, and how values are distributed."""
RATES = (
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"),
    *("prefix_cache_hits_total", "prefix_cache_queries_total", "iteration_tokens_total_count"),
    *("prompt_tokens_cached_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    "spec_decode_num_accepted_tokens_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
WHOLE = (
    f"sum by (finished_reason) (increase(vllm:request_success_total{SELECTED}[1m]))",
    f"sum(rate(vllm:prompt_tokens_total{SELECTED}[1m]))"
    f" / sum(rate(vllm:request_success_total{SELECTED}[1m]))",
    f"sum(rate(vllm:prefix_cache_hits_total{SELECTED}[1m]))"
    f" / (sum(rate(vllm:prefix_cache_queries_total{SELECTED}[1m])) > 0)",
    f"sum(rate(vllm:prompt_tokens_cached_total{SELECTED}[1m]))"
    f" / (sum(rate(vllm:prompt_tokens_total{SELECTED}[1m])) > 0)",
    f'sum(vllm:num_requests_waiting_by_reason{SELECTED[:-1]}, reason="capacity"}})',
    f'sum(vllm:num_requests_waiting_by_reason{SELECTED[:-1]}, reason="deferred"}})',
    # KEDA, gateways, alerts.
    "sum(vllm:num_requests_waiting) + sum(vllm:num_requests_running)",
    "avg_over_time(vllm:kv_cache_usage_perc[1m])",
    "count(vllm:num_requests_running) by (model_name)",
    "sum(rate(vllm:generation_tokens_total[1m])) by (model_name) >= 0",
    "changes(process_start_time_seconds[1m]) >= 0",
    "tokenyard:build_info == 1",
    "up == 1",
)


def queries() -> list[str]:
    by_name = SELECTED
    found = []
    for name in QUANTILES:
        bucket = f"rate(vllm:{name}_bucket{by_name}[1m])"
        found += [
            f"histogram_quantile(0.9, sum by (le) ({bucket}))",
            f"histogram_quantile(0.99, sum by (le, model_name) ({bucket}))",
            f"sum by (le) (increase(vllm:{name}_bucket{by_name}[1m]))",
            f"sum(rate(vllm:{name}_sum{by_name}[1m])) / sum(rate(vllm:{name}_count{by_name}[1m]))",
        ]
    found += [f"sum by (model_name) (rate(vllm:{name}{by_name}[1m]))" for name in RATES]
    found += [f"max by (instance, engine) (vllm:{name}{by_name})" for name in GAUGES]
    return [*found, *WHOLE]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has seen some work of a server."""
    folder = tmp_path_factory.mktemp("boards")
    with running_server(folder) as server:
        target = server.url.removeprefix("http://")
        (folder / "prometheus.yml").write_text(
            "scrape_configs:\n- job_name: vllm\n  scrape_interval: 1s\n  static_configs:\n"
            f"  - targets: ['{target}']\n"
        )
        address = f"127.0.0.1:{free_port()}"
        prometheus = subprocess.Popen(
            [
                *(str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"http://{address}"
            wait_for(lambda: is_scraping(url), 60)
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
            for number in range(6):
                messages = [{"role": "user", "content": f"Count from 1 to {number % 2 + 8}, please."}]
                client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
            time.sleep(2.5)  # two more scrapes
            yield url
        finally:
            prometheus.terminate()
            prometheus.wait(20)


def is_scraping(url: str) -> bool:
    """Ask Prometheus, which answers 503 in plain text while it starts."""
    try:
        return httpx.get(f"{url}/-/ready").is_success and bool(result(url, "up == 1"))
    except httpx.TransportError:
        return False


def result(url: str, query: str) -> list[dict]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert reply.get("status") == "success" or "not ready" in str(reply), reply
    return reply["data"]["result"] if "data" in reply else []


def test_every_panel_has_data(asked: str) -> None:
    assert [query for query in queries() if not result(asked, query)] == []
    numbers = [
        value["value"][1]
        for name in QUANTILES
        for value in result(asked, f"sum(rate(vllm:{name}_count{SELECTED}[1m]))")
    ]
    assert all(float(number) > 0 for number in numbers)


def test_every_metric_of_a_board_is_on_the_page_under_its_own_type(asked: str) -> None:
    metadata = httpx.get(f"{asked}/api/v1/metadata").json()["data"]
    types = {name.removeprefix("vllm:"): facts[0]["type"] for name, facts in metadata.items()}
    assert {types.get(name) for name in QUANTILES} == {"histogram"}
    assert {types.get(name) for name in RATES if name.endswith("_total")} == {"counter"}
