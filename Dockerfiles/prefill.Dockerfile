# A prefill node: computes the KVCache of prompts.
FROM python:3.11-slim AS requirements
COPY pyproject.toml Dockerfiles/requirements.py ./
RUN python requirements.py engine model > /requirements.txt

# The CPU kernels for every instruction set: the node's image needs no compiler.
FROM python:3.11-slim AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /requirements.txt ./
RUN pip install --no-cache-dir $(grep ^msgspec requirements.txt)
COPY shared shared
RUN python -m shared.engine.native.build /kernels

FROM python:3.11-slim

RUN useradd --uid 10001 --create-home tsukimi && install -d -o tsukimi -g tsukimi /models
ENV PYTHONUNBUFFERED=1 TSUKIMI_CACHE=/models TSUKIMI_KERNELS_FOLDER=/kernels
WORKDIR /app

# PyTorch's own index of CPU builds, for instance: smaller than the default, which brings CUDA.
ARG TORCH_INDEX=""
COPY --from=requirements /requirements.txt ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.txt

COPY --from=kernels /kernels /kernels
COPY pyproject.toml README.md ./
COPY shared shared
COPY services services
COPY tsukimi tsukimi
COPY Dockerfiles/entrypoint.sh /usr/local/bin/
RUN pip install --no-cache-dir --no-deps .

USER tsukimi
HEALTHCHECK --interval=20s --timeout=10s --start-period=120s \
  CMD python -m tsukimi.probe node "prefill-$(hostname)" "${TSUKIMI_PREFILL_NATS_URL:-nats://127.0.0.1:4222}"
ENTRYPOINT ["entrypoint.sh", "prefill", "prefill"]
