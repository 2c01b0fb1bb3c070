"""The custom resources that we write, as JSON schemas: the part of each that we use, and nothing else.

Owns: fields and types for KEDA's ScaledObject, the Prometheus operator's PodMonitor, the Gateway API's
HTTPRoute, the inference extension's InferencePool, LeaderWorkerSet and RayCluster. Pods of the latter two are
checked as a Deployment's. A field that is not here is a mistake, or a reason to look it up and add it.
Source: the CRDs of keda.sh v1alpha1, monitoring.coreos.com v1, gateway.networking.k8s.io v1,
inference.networking.k8s.io v1, leaderworkerset.x-k8s.io v1 and ray.io v1, as their projects publish them.
"""

from typing import Any

_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_SECONDS = {"type": "integer", "minimum": 0}
_DURATION = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}
_NUMBER_AS_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object({"name": _NAME}, {"labels": _LABELS, "annotations": _LABELS, "namespace": _NAME})
    head = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _object({**head, "metadata": metadata, "spec": spec})


_KEY_OF_SECRET = _object({"name": _NAME, "key": {"type": "string"}})

_SCALING = _object(
    {
        "policies": _list(
            _object({"type": {"enum": ["Pods", "Percent"]}, "value": _SECONDS, "periodSeconds": _SECONDS})
        )
    },
    {"stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600}},
)
_TRIGGER = _object(
    {
        "type": {"const": "prometheus"},
        "metadata": _object(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": {"type": "string"},
                "threshold": _NUMBER_AS_TEXT,
            },
            {"activationThreshold": _NUMBER_AS_TEXT},
        ),
    },
    {"name": {"type": "string"}, "metricType": {"enum": ["AverageValue", "Value"]}},
)
SCALED_OBJECT = _resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    _object(
        {"scaleTargetRef": _object({"name": _NAME}), "triggers": _list(_TRIGGER)},
        {
            "minReplicaCount": _SECONDS,
            "maxReplicaCount": {"type": "integer", "minimum": 1},
            "pollingInterval": _SECONDS,
            "cooldownPeriod": _SECONDS,
            "fallback": _object({"failureThreshold": _SECONDS, "replicas": _SECONDS}),
            "advanced": _object(
                {
                    "horizontalPodAutoscalerConfig": _object(
                        {"behavior": _object({}, {"scaleUp": _SCALING, "scaleDown": _SCALING})}
                    )
                }
            ),
        },
    ),
)
POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _object(
        {
            "selector": _object({"matchLabels": _LABELS}),
            "podMetricsEndpoints": _list(
                _object(
                    {"port": {"type": "string"}, "path": {"type": "string"}},
                    {
                        "interval": _DURATION,
                        "scrapeTimeout": _DURATION,
                        "scheme": {"enum": ["http", "https", "HTTP", "HTTPS"]},
                        "tlsConfig": _object(
                            {"insecureSkipVerify": {"type": "boolean"}},
                            {"cert": _object({"secret": _KEY_OF_SECRET}), "keySecret": _KEY_OF_SECRET},
                        ),
                    },
                )
            ),
        },
        {"jobLabel": {"type": "string"}},
    ),
)
INFERENCE_POOL = _resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    _object(
        {
            "targetPorts": _list(_object({"number": _PORT})),
            "selector": _object({"matchLabels": _LABELS}),
            "endpointPickerRef": _object(
                {"name": _NAME, "port": _object({"number": _PORT})},
                {"failureMode": {"enum": ["FailOpen", "FailClose"]}},
            ),
        }
    ),
)
HTTP_ROUTE = _resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _object(
        {
            "parentRefs": _list(_object({"name": _NAME}, {"namespace": _NAME})),
            "rules": _list(
                _object(
                    {
                        "backendRefs": _list(
                            _object(
                                {
                                    "group": {"const": "inference.networking.k8s.io"},
                                    "kind": {"const": "InferencePool"},
                                    "name": _NAME,
                                }
                            )
                        )
                    },
                    {
                        "matches": _list(
                            _object(
                                {
                                    "path": _object(
                                        {
                                            "type": {"enum": ["Exact", "PathPrefix"]},
                                            "value": {"type": "string", "pattern": "^/"},
                                        }
                                    )
                                }
                            )
                        ),
                        "timeouts": _object({"request": _DURATION}, {"backendRequest": _DURATION}),
                    },
                )
            ),
        }
    ),
)
_POD_TEMPLATE = _object({"metadata": _object({"labels": _LABELS}), "spec": {"type": "object"}})
LEADER_WORKER_SET = _resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    _object(
        {
            "leaderWorkerTemplate": _object(
                {"size": {"type": "integer", "minimum": 1}, "workerTemplate": _POD_TEMPLATE},
                {
                    "leaderTemplate": _POD_TEMPLATE,
                    "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                },
            )
        },
        {
            "replicas": {"type": "integer", "minimum": 0},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        },
    ),
)
_RAY_START = {"rayStartParams": _LABELS, "template": _POD_TEMPLATE}
RAY_CLUSTER = _resource(
    "ray.io/v1",
    "RayCluster",
    _object(
        {
            "rayVersion": {"type": "string", "pattern": r"^2\.[0-9]+\.[0-9]+$"},
            "headGroupSpec": _object(_RAY_START, {"serviceType": {"enum": ["ClusterIP", "LoadBalancer"]}}),
            "workerGroupSpecs": _list(
                _object(
                    {"groupName": _NAME, **_RAY_START},
                    dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), _SECONDS),
                )
            ),
        }
    ),
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "ScaledObject": SCALED_OBJECT,
    "PodMonitor": POD_MONITOR,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "RayCluster": RAY_CLUSTER,
}
