"""Rules, alerts, dashboard: each reads only what is exported, and each alert says what to do."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.write_dashboard import PAGE, render
from server.edge.observe.http_metrics import OWN_LIMIT
from tests.deploy import promql
from tests.deploy.exported import FROM_PROMETHEUS, faults, series

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")
SEVERITIES = {"critical", "warning", "info"}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules_in(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / name)["groups"] for rule in group["rules"]]


RECORDED = rules_in("rules.yaml")
ALERTS = rules_in("alerts.yaml")
RECORDED_NAMES = frozenset(rule["record"] for rule in RECORDED)
DASHBOARD = json.loads(PAGE.read_text(encoding="utf-8"))
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


# The reader itself.


def test_the_reader_finds_metrics_labels_and_groups() -> None:
    reads = promql.read(
        'sum by (job, le) (rate(a:b_total{x="1",y=~"2.."}[5m])) / on (job) c > 0.5 or vector(0)'
    )
    assert reads.selectors == [
        promql.Selector("a:b_total", (("x", "=", "1"), ("y", "=~", "2.."))),
        promql.Selector("c"),
    ]
    assert reads.labels == {"job", "le"}


@pytest.mark.parametrize("expression", ["summ(a)", "sum(a", "a{x=}", "a; b"])
def test_the_reader_refuses_what_it_does_not_understand(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        promql.read(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "tokenyard:num_request_waiting",
        'tokenyard:request_success_total{reason="stop"}',
        'tokenyard:request_success_total{finished_reason="stopped"}',
        "sum by (tenant) (tokenyard:ready)",
    ],
)
def test_a_name_that_nobody_exports_is_found(expression: str) -> None:
    assert faults(promql.read(expression))


# Rules.


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: rule["record"])
def test_a_recorded_ratio_reads_what_is_exported(rule: dict[str, Any]) -> None:
    assert not faults(promql.read(rule["expr"]))
    assert re.fullmatch(r"job:\w+:\w+", rule["record"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_reads_what_is_exported_or_recorded(rule: dict[str, Any]) -> None:
    reads = promql.read(rule["expr"])
    assert not faults(reads, RECORDED_NAMES)
    for selector in reads.selectors:
        if selector.metric not in FROM_PROMETHEUS and selector.metric.startswith(
            ("tokenyard:num_requests_wait",)
        ):
            continue  # joined to another that selects the job
        assert ("job", "=", "tokenyard") in selector.matchers, selector.metric


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_all_that_its_reader_needs(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert rule["annotations"]["summary"].endswith(".")


def test_no_ratio_of_errors_counts_what_a_client_can_have_at_will() -> None:
    """With a time limit of a microsecond, say."""
    queries = [rule["expr"] for rule in RECORDED] + [query for _, query in QUERIES]
    of_errors = [
        selector.matchers
        for query in queries
        for selector in promql.read(query).selectors
        if ("status", "=~", "5..") in selector.matchers
    ]
    assert len(of_errors) == 2
    assert all(("limit", "!=", OWN_LIMIT) in matchers for matchers in of_errors)


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", runbook, flags=re.MULTILINE) == [rule["alert"] for rule in ALERTS]


def test_every_section_says_what_it_means_how_to_look_and_what_to_do() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    for section in runbook.split("\n### ")[1:]:
        name, text = section.split("\n", maxsplit=1)
        for heading in ("**Means**", "**Look**", "**Do**"):
            assert heading in text, name


def test_the_alerts_of_a_crowd_and_of_an_ill_replica_are_there() -> None:
    reads = {
        selector.metric for rule in (*ALERTS, *RECORDED) for selector in promql.read(rule["expr"]).selectors
    }
    must_be_watched = {
        "up",
        "tokenyard:ready",
        "tokenyard:live",
        "tokenyard:engine_restarts_total",
        "tokenyard:scheduler_stalls_total",
        "tokenyard:kv_cache_usage_perc",
        "tokenyard:num_requests_waiting",
        "tokenyard:http_requests_total",
        "tokenyard:time_to_first_token_seconds_bucket",
    }
    assert must_be_watched <= reads


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say_and_alerts_fire_when_they_should() -> None:
    assert PROMTOOL is not None
    checks = (
        ["check", "config", PROMETHEUS / "prometheus.yaml"],
        ["check", "rules", PROMETHEUS / "rules.yaml", PROMETHEUS / "alerts.yaml"],
        ["test", "rules", ROOT / "tests" / "deploy" / "alerts_test.yaml"],
    )
    for words in checks:
        done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(("target_s", "expected"), [(2, [1.5]), (0, [])])
def test_the_autoscaler_reads_forecasts_beside_their_target(
    tmp_path: Path, target_s: int, expected: list[float]
) -> None:
    path = ROOT / "deploy" / "kubernetes" / "overlays" / "autoscaled" / "scaledobject.yaml"
    triggers = next(each for each in yaml.safe_load_all(path.read_text()) if "triggers" in each["spec"])
    (query,) = (
        each["metadata"]["query"] for each in triggers["spec"]["triggers"] if each["name"] == "first-token"
    )
    rows = {"2": "0+80x9", "4": "0+100x9", "+Inf": "0+100x9"}
    name, labels = "tokenyard:predicted_first_token_seconds_bucket", 'job="tokenyard",instance="a"'
    series = [{"series": f'{name}{{{labels},le="{le}"}}', "values": each} for le, each in rows.items()]
    target = f"tokenyard:first_token_target_seconds{{{labels}}}"
    series.append({"series": target, "values": f"{target_s}x9"})
    samples = [{"labels": "{}", "value": value} for value in expected]
    asked = {"expr": query, "eval_time": "4m", "exp_samples": samples}
    world = {"interval": "30s", "input_series": series, "promql_expr_test": [asked]}
    (tmp_path / "keda.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [world]}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", tmp_path / "keda.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_shell_lines_of_the_page_make_rules_for_the_operator_of_both_files() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    (lines,) = [
        block for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL) if "PrometheusRule" in block
    ]
    script = f"kubectl() {{ cat; }}\n{lines}"
    made = subprocess.run(
        ["sh", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    )
    objects = [item for item in yaml.safe_load_all(made.stdout) if item]
    assert {item["kind"] for item in objects} == {"PrometheusRule"}
    assert [item["metadata"]["name"] for item in objects] == ["tokenyard-rules", "tokenyard-alerts"]
    assert [item["spec"] for item in objects] == [
        load(PROMETHEUS / "rules.yaml"),
        load(PROMETHEUS / "alerts.yaml"),
    ]


# The dashboard.


def test_the_dashboard_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python scripts/write_dashboard.py"


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=lambda word: word[:40])
def test_a_panel_reads_what_is_exported(title: str, query: str) -> None:
    reads = promql.read(query)
    assert not faults(reads), title
    for selector in reads.selectors:
        chosen = {(label, value) for label, _, value in selector.matchers}
        assert {("job", "$job"), ("instance", "$instance")} <= chosen, title


def test_panels_fill_the_width_without_overlapping() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(column < 24 for column, _ in cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_answers_each_question_of_an_operator() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Is it healthy?",
        "Latency",
        "Queue",
        "Scheduler",
        "KV and prefix cache",
        "Priorities, and how requests end",
        "Engine processes",
        "HTTP",
    ]
    read = {selector.metric for _, query in QUERIES for selector in promql.read(query).selectors}
    assert read <= series().keys()


def test_the_dashboard_asks_whatever_data_source_is_chosen() -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert variable["query"] == "prometheus"
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
