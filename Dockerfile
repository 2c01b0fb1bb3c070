# Tokenyard in a container. On a machine without a GPU:
#
#     docker build --build-arg TORCH_INDEX_URL=<address of PyTorch's CPU index> -t tokenyard:cpu .
#
# and for NVIDIA GPUs, whose libraries come with the ordinary torch package:
#
#     docker build --build-arg DEVICE=cuda -t tokenyard:cuda .
#
# How to run it, without a writable root and under any user id: docs/operations.md

# Python's official image, whose digest is that of all its platforms together. docs/decisions/dependencies.md#locks-by-hash
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${PYTHON_IMAGE} AS build
ARG PYTHON_IMAGE
# A tag may be another image tomorrow; "yes" takes one all the same, and images that were built here.
ARG BASE_WITHOUT_DIGEST=no
RUN case "$PYTHON_IMAGE@$BASE_WITHOUT_DIGEST" in \
      *@sha256:*|*@yes) ;; \
      *) echo "PYTHON_IMAGE=$PYTHON_IMAGE is no digest: pass --build-arg PYTHON_IMAGE=<image>@sha256:<digest>," \
              "which your registry shows, or --build-arg BASE_WITHOUT_DIGEST=yes" >&2; exit 1 ;; \
    esac
# Which of deploy/locks is installed.
ARG DEVICE=cpu
# The one index that torch comes from; all else comes from pip's own. Empty: pip's own has it, or PIP_FIND_LINKS.
ARG TORCH_INDEX_URL=""
# A folder or page with wheels, read by pip itself; empty is as if it were not set.
ARG PIP_FIND_LINKS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/tokenyard
ENV PATH=/opt/tokenyard/bin:$PATH
WORKDIR /src
# For the CPU kernels; the final stage has a compiler only where Triton needs one.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# First what changes seldom: the dependencies are gigabytes, our own code is not.
# No file is installed that is not in a lock, by its hash; `pip check` finds a dependency that a lock forgot.
COPY deploy/locks deploy/locks
RUN case "$DEVICE" in cpu|cuda) ;; *) echo "DEVICE must be cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; esac \
    && if [ "$DEVICE" = cpu ]; then \
      pip install --no-deps --require-hashes ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
          -r deploy/locks/torch-cpu.txt \
      || { echo "no CPU build of torch, as deploy/locks/torch-cpu.txt names it, is at the given indexes; the" \
                "ordinary one has gigabytes of CUDA libraries: pass --build-arg TORCH_INDEX_URL=<address of" \
                "PyTorch's CPU index>, or DEVICE=cuda" >&2; exit 1; }; \
    fi \
    && pip install --no-deps --require-hashes -r "deploy/locks/$DEVICE.txt"

COPY README.md LICENSE NOTICE pyproject.toml setup.py ./
COPY deploy/image deploy/image
COPY bench bench
COPY engine engine
COPY scheduler scheduler
COPY server server
COPY tokenyard tokenyard
COPY worker worker
# -P: beside the modules that were installed, not in this folder, which the final stage does not get.
# tokenyard.inside: where a wheel has our packages; this one module needs nothing beside it.
# --no-build-isolation: with the setuptools of the lock, else pip would fetch one that nobody named.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip install --no-deps /wheels/tokenyard-*.whl \
    && pip check \
    && tokenyard --version \
    && python -P -m tokenyard.inside.worker.cpu.kernel_build --in-place \
    && cp -r deploy /opt/tokenyard/deploy


FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Tokenyard" \
      org.opencontainers.image.description="An OpenAI-compatible inference server for language models." \
      org.opencontainers.image.licenses="Apache-2.0"

# Triton builds the launcher of its kernels with a C compiler, at the first start on a GPU. A volume at /cache,
# with XDG_CACHE_HOME=/cache, keeps what it compiled for the next container.
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/* \
      && install -d -o 10001 -g 0 -m 2770 /cache; \
    fi

COPY --from=build /opt/tokenyard /opt/tokenyard
# Here and not above: the build stage has packages of the system that this one has not.
RUN PYTHONPATH=/opt/tokenyard/deploy/image /opt/tokenyard/bin/python -m write_sbom /opt/tokenyard/deploy/locks \
    > /opt/tokenyard/sbom.cdx.json

# HOME and USER: the user id has no entry in /etc/passwd, and some libraries ask who they are.
# PYTHONSAFEPATH: a Python file in the working directory must not stand in for one of ours.
# TOKENYARD_HOST: outside of the container nobody reaches the loopback address. It then starts only with
# TOKENYARD_API_KEY, or with TOKENYARD_ALLOW_UNAUTHENTICATED=true.
# NVIDIA_*: what the NVIDIA container runtime reads; without that runtime they mean nothing.
ENV PATH=/opt/tokenyard/bin:$PATH \
    HOME=/tmp \
    USER=tokenyard \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TOKENYARD_HOST=0.0.0.0 \
    TOKENYARD_PORT=8000

WORKDIR /
# By number, so that an orchestrator can see that it is not root. Group 0: an arbitrary user id, as some
# clusters assign them, belongs to it as well.
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM

# The first minutes belong to the model's loading: a failure then does not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import http.client, os; port = os.environ.get('TOKENYARD_HEALTH_PORT') or os.environ.get('TOKENYARD_PORT', ''); port = int(port) if port.isdigit() else 8000; connection = http.client.HTTPConnection('127.0.0.1', port, timeout=4); connection.request('GET', '/health/ready'); raise SystemExit(connection.getresponse().status != 200)"]

ENTRYPOINT ["tokenyard", "serve"]
