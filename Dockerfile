# Images of the three services, one target each: gateway, verifier, drafter. docs/containers.md says how to build them.
# A tag can be pushed to again: BASE_IMAGE=python:3.11-slim@sha256:... builds on what you have looked at.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/draftwire/bin:$PATH

# What a stage hands to an image lies in /layer and becomes one layer. DATED gives it all one date, whenever it was built:
# equal content is an equal layer, which registries and nodes that have it do not transfer again.
FROM base AS layer
ENV SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0 \
    DATED="find /layer -exec touch --no-dereference --date=@315532800 {} +"

# The user, whose number is fixed, so that volumes and security policies can name it; a volume's place; the health check.
FROM layer AS user
RUN groupadd --gid 10001 draftwire \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin draftwire \
 && install -d /layer/etc /layer/usr/local/bin \
 && install -d -o draftwire -g draftwire /layer/cache \
 && cp --preserve /etc/passwd /etc/group /etc/shadow /etc/gshadow /layer/etc/
COPY deploy/ready.sh /layer/usr/local/bin/
RUN chmod 755 /layer/usr/local/bin/ready.sh && $DATED

# Packages come from wheels/, from the index that pip is told of, or from both. pip prefers a wheel of torch that is made
# for one kind of device, so the CPU wheel alone in wheels/ chooses the CPU build.
FROM layer AS builder
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
# Bytecode is made at the end and never checked against its source, for nothing can be written later. Left out are tests,
# some of which are for newer Pythons, and the hundreds of model families, of which a service loads one. One process compiles
# all files in their order: how it writes one depends on those before.
ENV COMPILE="python -m compileall -q -f --invalidation-mode unchecked-hash" \
    NOT_COMPILED="/tests/|/torch/testing/_internal/|/transformers/models/(?!auto/)" \
    INSTALL="pip --python /opt/draftwire/bin/python install --no-compile" \
    PIP_CONSTRAINT=/src/constraints.txt PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv --without-pip /opt/draftwire && touch README.md
COPY constraints.txt pyproject.toml ./
COPY draftwire/__init__.py draftwire/

# What a service depends on, without our own code: a layer that only another dependency changes.
# Four tenths of it would be of no use to a gateway: models that need torch, downloads from a hub, and the sources and
# docstrings of the Kubernetes client, which are generated.
FROM builder AS gateway-dependencies
RUN --mount=type=bind,source=wheels,target=/wheels \
    $INSTALL '.[gateway,kubernetes]' \
 && pip --python /opt/draftwire/bin/python uninstall -y draftwire hf_xet \
 && cd /opt/draftwire/lib/python*/site-packages \
 && find transformers/models -path '*/auto' -prune -o \
      -regex '.*/\(modeling\|modular\|convert\|image_processing\|video_processing\)_.*\.py' -exec rm {} + \
 && $COMPILE -b -o 2 kubernetes \
 && find kubernetes -name '*.py' -delete \
 && $COMPILE -x "$NOT_COMPILED" /opt/draftwire/lib \
 && mkdir -p /layer/opt && mv /opt/draftwire /layer/opt/ && $DATED

FROM builder AS model-dependencies
ARG TORCH_BUILD=cpu
# services,openvino adds the engine of docs/cpu.md.
ARG EXTRAS=services
RUN --mount=type=bind,source=wheels,target=/wheels \
    $INSTALL ".[$EXTRAS]" \
 && pip --python /opt/draftwire/bin/python uninstall -y draftwire \
 && build=$(/opt/draftwire/bin/python -B -c 'import torch; print("cuda" if torch.version.cuda else "cpu")') \
 && { test "$build" = "$TORCH_BUILD" || { echo "this is the $build build of torch, not $TORCH_BUILD" >&2; exit 1; }; } \
 && $COMPILE -x "$NOT_COMPILED" /opt/draftwire/lib \
 && mkdir -p /layer/opt && mv /opt/draftwire /layer/opt/ && $DATED

# vLLM with what a verifier needs beside it; its transformers is older than the one of the other images. vLLM's own wheel
# says for which devices it is.
FROM builder AS vllm-dependencies
ENV PIP_CONSTRAINT=/src/constraints-vllm.txt
COPY constraints-vllm.txt ./
RUN --mount=type=bind,source=wheels,target=/wheels \
    $INSTALL '.[vllm]' \
 && pip --python /opt/draftwire/bin/python uninstall -y draftwire \
 && $COMPILE -x "$NOT_COMPILED" /opt/draftwire/lib \
 && mkdir -p /layer/opt && mv /opt/draftwire /layer/opt/ && $DATED

# Our own code, to be laid over what it depends on, and the models of the embedded pair, readable by all wherever they were
# checked out.
FROM builder AS package
COPY LICENSE README.md ./
COPY draftwire draftwire
COPY services services
RUN --mount=type=bind,source=wheels,target=/wheels \
    $INSTALL --no-deps --prefix /layer/opt/draftwire . \
 && $COMPILE -s /layer -p / /layer/opt/draftwire/lib && chmod -R u=rwX,go=rX /layer && $DATED

FROM layer AS target
COPY models/target /layer/models/target
RUN chmod -R u=rwX,go=rX /layer && $DATED

FROM layer AS drafter-model
COPY models/drafter /layer/models/drafter
RUN chmod -R u=rwX,go=rX /layer && $DATED

# What runs: files that are root's, bytecode at hand, and a home under /tmp for whatever wants to write.
FROM base AS runtime
ENV HOME=/tmp HF_HOME=/tmp/huggingface OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /tmp
COPY --from=user /layer/ /
USER 10001:10001
STOPSIGNAL SIGTERM
ARG BASE_IMAGE
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.base.name=${BASE_IMAGE} \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION}

FROM runtime AS gateway
LABEL org.opencontainers.image.title=draftwire-gateway \
      org.opencontainers.image.description="Joins drafters and verifiers into streams of text"
COPY --from=gateway-dependencies /layer/ /
COPY --from=package /layer/ /
ENV DRAFTWIRE_GATEWAY_HOST=0.0.0.0 DRAFTWIRE_GATEWAY_METRICS_PORT=9051 DRAFTWIRE_GATEWAY_LOG_FORMAT=json
EXPOSE 50051 8000 9051
HEALTHCHECK --interval=5s --timeout=15s --start-period=120s --retries=3 \
  CMD ["ready.sh", "DRAFTWIRE_GATEWAY_METRICS_PORT", "9051", "10"]
ENTRYPOINT ["draftwire", "serve", "gateway"]

FROM runtime AS model-runtime
COPY --from=model-dependencies /layer/ /
COPY --from=package /layer/ /

FROM model-runtime AS verifier
LABEL org.opencontainers.image.title=draftwire-verifier \
      org.opencontainers.image.description="Runs the target model and judges draft blocks"
COPY --from=target /layer/ /
ENV DRAFTWIRE_VERIFIER_HOST=0.0.0.0 DRAFTWIRE_VERIFIER_LOG_FORMAT=json DRAFTWIRE_VERIFIER_MODEL=/models/target
EXPOSE 50052 9052
HEALTHCHECK --interval=5s --timeout=15s --start-period=120s --retries=3 \
  CMD ["ready.sh", "DRAFTWIRE_VERIFIER_METRICS_PORT", "9052", "10"]
ENTRYPOINT ["draftwire", "serve", "verifier"]

# docs/vllm.md. Not built by deploy/build_images.sh: vLLM and what it needs come from an index.
FROM runtime AS verifier-vllm
LABEL org.opencontainers.image.title=draftwire-verifier-vllm \
      org.opencontainers.image.description="Runs the target model on vLLM and judges draft blocks"
COPY --from=vllm-dependencies /layer/ /
COPY --from=package /layer/ /
ENV DRAFTWIRE_VERIFIER_HOST=0.0.0.0 DRAFTWIRE_VERIFIER_LOG_FORMAT=json DRAFTWIRE_VERIFIER_ENGINE=vllm
EXPOSE 50052 9052
HEALTHCHECK --interval=5s --timeout=15s --start-period=30m --retries=3 \
  CMD ["ready.sh", "DRAFTWIRE_VERIFIER_METRICS_PORT", "9052"]
ENTRYPOINT ["draftwire", "serve", "verifier"]

FROM model-runtime AS drafter
LABEL org.opencontainers.image.title=draftwire-drafter \
      org.opencontainers.image.description="Runs the draft model and sends blocks to verifiers"
COPY --from=drafter-model /layer/ /
ENV DRAFTWIRE_DRAFTER_HOST=0.0.0.0 DRAFTWIRE_DRAFTER_LOG_FORMAT=json DRAFTWIRE_DRAFTER_MODEL=/models/drafter
EXPOSE 50053 9053
HEALTHCHECK --interval=5s --timeout=15s --start-period=120s --retries=3 \
  CMD ["ready.sh", "DRAFTWIRE_DRAFTER_METRICS_PORT", "9053", "10"]
ENTRYPOINT ["draftwire", "serve", "drafter"]
