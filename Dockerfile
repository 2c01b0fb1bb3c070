# Tokenyard in a container. On a machine without a GPU:
#
#     docker build --build-arg PIP_EXTRA_INDEX_URL=<address of PyTorch's CPU index> -t tokenyard:cpu .
#
# and for NVIDIA GPUs, whose libraries come with the ordinary torch package:
#
#     docker build --build-arg DEVICE=cuda -t tokenyard:cuda .
#
# How to run it, without a writable root and under any user id: docs/operations.md

ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# cpu keeps torch to the release that constraints-cpu.txt names; cuda takes what pip finds newest.
ARG DEVICE=cpu
# Where else pip looks for packages. Read by pip itself; empty is as if it were not set.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/tokenyard
ENV PATH=/opt/tokenyard/bin:$PATH
WORKDIR /src
# For the CPU kernels; the final stage has a compiler only where Triton needs one.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# First what changes seldom: the dependencies are gigabytes, our own code is not.
COPY pyproject.toml constraints-cpu.txt ./
RUN case "$DEVICE" in \
      cpu) cp constraints-cpu.txt /constraints.txt ;; \
      cuda) : > /constraints.txt ;; \
      *) echo "DEVICE must be cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; \
    esac
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join(p['dependencies'] + p['optional-dependencies']['fast']))" > /requirements.txt \
    && pip install -c /constraints.txt -r /requirements.txt

COPY README.md LICENSE NOTICE setup.py ./
COPY bench bench
COPY engine engine
COPY scheduler scheduler
COPY server server
COPY tokenyard tokenyard
COPY worker worker
# -P: beside the modules that were installed, not in this folder, which the final stage does not get.
# tokenyard.inside: where a wheel has our packages; this one module needs nothing beside it.
RUN pip wheel --no-deps --wheel-dir /wheels . \
    && pip install --no-deps /wheels/tokenyard-*.whl \
    && tokenyard --version \
    && python -P -m tokenyard.inside.worker.cpu.kernel_build --in-place


FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Tokenyard" \
      org.opencontainers.image.description="An OpenAI-compatible inference server for language models." \
      org.opencontainers.image.licenses="Apache-2.0"

# Triton builds the launcher of its kernels with a C compiler, at the first start on a GPU.
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi

COPY --from=build /opt/tokenyard /opt/tokenyard

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
