"""Options of other servers: the name here, or why there is none.

Owns: the advice for a flag that vLLM, llama.cpp or TGI has, which no similarity of spelling finds.
Never: accepts such a flag: what it means there may differ from what the option means here.
"""

_OURS = {
    **{
        "tp": "tensor-parallel-size",
        "tensor-parallel": "tensor-parallel-size",
        "num-shard": "tensor-parallel-size",
        "dp": "data-parallel-size",
        "data-parallel": "data-parallel-size",
        "master-port": "cluster-port",
        "distributed-executor-backend": "distributed-executor",
    },
    **{"c": "max-model-len", "ctx-size": "max-model-len", "max-total-tokens": "max-model-len"},
    **{"model-id": "model", "m": "model", "tokenizer": "model", "a": "served-model-name"},
    **{"np": "max-num-seqs", "parallel": "max-num-seqs", "max-concurrent-requests": "max-queued-requests"},
    **{"max-batch-total-tokens": "max-num-batched-tokens", "ubatch-size": "max-num-batched-tokens"},
    **{"threads": "num-threads", "t": "num-threads", "threads-http": "num-threads"},
    **{"cuda-memory-fraction": "gpu-memory-utilization", "mem-fraction-static": "gpu-memory-utilization"},
    **{"num-gpu-blocks": "num-gpu-blocks-override", "kv-cache-memory-bytes": "kv-cache-memory"},
    **{"cpu-offload-gb": "swap-space", "kv-offloading-size": "swap-space"},
    **{"kv-events-config": "kv-events-port"},
    **{"ssl-keyfile": "tls-key", "ssl-certfile": "tls-cert", "ssl-ca-certs": "tls-client-ca"},
    **{"ssl-key-file": "tls-key", "ssl-cert-file": "tls-cert", "allowed-origins": "cors-origin"},
    **{"cors-allow-origin": "cors-origin", "uvicorn-log-level": "log-level", "timeout": "request-timeout"},
    **{"chat-template-file": "chat-template", "rope-scaling": "hf-overrides", "api-prefix": "root-path"},
    **{"enable-chunked-prefill": "batching", "schedule-policy": "scheduling-policy"},
}
_NOT_NEEDED = {
    **dict.fromkeys(("trust-remote-code",), "code of a checkpoint is never run"),
    **dict.fromkeys(("revision", "download-dir", "load-format"), "`tokenyard pull` fetches models"),
    **dict.fromkeys(("disable-log-requests", "no-enable-log-requests"), "texts of requests are never logged"),
    **dict.fromkeys(("disable-log-stats",), "there are no statistics in the log: /metrics has them"),
    **dict.fromkeys(("enable-auto-tool-choice", "jinja"), "tools are on wherever the model has a dialect"),
    **dict.fromkeys(("hostname",), "use --host"),
    **dict.fromkeys(("enable-lora",), "--lora-modules and --lora-directory turn adapters on"),
    **dict.fromkeys(
        ("ngl", "n-gpu-layers", "gpu-layers"), "a model lies on one kind of device: use --device"
    ),
}


def advice_for(flag: str, known: frozenset[str]) -> str:
    """Advise on a flag without its dashes; empty if no other server that we know has it."""
    ours = _OURS.get(flag)
    if ours in known:
        return f"here it is --{ours}: `tokenyard serve --help` says what it counts"
    why = _NOT_NEEDED.get(flag)
    return f"it is not needed here: {why}" if why else ""
