"""Write the Grafana dashboard, deploy/grafana/tokenyard.json, from the panels in panels.yaml beside it.

    python scripts/write_dashboard.py

Owns: the layout, and what Grafana wants said about each panel. tests/deploy/test_monitoring.py fails when
the file is stale.
Never: decides what is shown.
"""

import json
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
PANELS, PAGE = FOLDER / "panels.yaml", FOLDER / "tokenyard.json"
_WIDTH = 24
_HEIGHTS = {"stat": 4, "timeseries": 8}
_PERCENTILES = (50, 95, 99)
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF = 'job=~"$job",instance=~"$instance"'


def render() -> str:
    rows = yaml.safe_load(PANELS.read_text(encoding="utf-8"))
    return json.dumps(_dashboard(rows), indent=1) + "\n"


def _dashboard(rows: list[dict[str, Any]]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        kind = row.get("kind", "timeseries")
        panels.append(_row(len(panels) + 1, row["row"], top))
        height, width = _HEIGHTS[kind], _WIDTH // len(row["panels"])
        for column, panel in enumerate(row["panels"]):
            place = {"h": height, "w": width, "x": column * width, "y": top + 1}
            panels.append({"id": len(panels) + 1, "type": kind, "gridPos": place, **_panel(panel, kind)})
        top += 1 + height
    return {
        "uid": "tokenyard",
        "title": "Tokenyard",
        "tags": ["tokenyard"],
        "schemaVersion": 39,
        "timezone": "",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "editable": True,
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: dict[str, Any], kind: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if "alarm" in panel:
        steps.append({"color": "red", "value": panel["alarm"]})
    defaults: dict[str, Any] = {
        "unit": panel["unit"],
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if kind == "timeseries":
        drawn = "line" if "alarm" in panel else "off"
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never", "thresholdsStyle": {"mode": drawn}}
    queries = panel["queries"] if "queries" in panel else _percentiles(panel["percentiles"])
    return {
        "title": panel["title"],
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.replace("OF", _OF).replace("RATE", "$__rate_interval"),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def _percentiles(histogram: str) -> dict[str, str]:
    return {
        f"p{share}": f"histogram_quantile({share / 100}, sum by (le) (rate({histogram}_bucket{{OF}}[RATE])))"
        for share in _PERCENTILES
    }


def _variables() -> list[dict[str, Any]]:
    several = {
        "type": "query",
        "datasource": _DATASOURCE,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
    }
    replicas = 'label_values(tokenyard:ready{job=~"$job"}, instance)'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "job", "label": "Job", "query": "label_values(tokenyard:ready, job)", **several},
        {"name": "instance", "label": "Replica", "query": replicas, **several},
    ]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
