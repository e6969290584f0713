# The conductor: places every request by where its KVCache is. No torch.
FROM python:3.11-slim AS requirements
COPY pyproject.toml Dockerfiles/requirements.py ./
RUN python requirements.py > /requirements.txt

FROM python:3.11-slim

RUN useradd --uid 10001 --create-home tsukimi && install -d -o tsukimi -g tsukimi /models
ENV PYTHONUNBUFFERED=1 TSUKIMI_CACHE=/models
WORKDIR /app

COPY --from=requirements /requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt

COPY pyproject.toml README.md ./
COPY shared shared
COPY services services
COPY tsukimi tsukimi
COPY Dockerfiles/entrypoint.sh /usr/local/bin/
RUN pip install --no-cache-dir --no-deps .

USER tsukimi
HEALTHCHECK --interval=20s --timeout=10s --start-period=120s \
  CMD python -m tsukimi.probe node "conductor-$(hostname)" "${TSUKIMI_CONDUCTOR_NATS_URL:-nats://127.0.0.1:4222}"
ENTRYPOINT ["entrypoint.sh", "conductor", "conductor"]
