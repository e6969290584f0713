# The gateway: HTTP, WebSocket and NATS in front of the cluster. No torch.
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
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD python -m tsukimi.probe http 8000 /ready
ENTRYPOINT ["entrypoint.sh", "gateway", "gateway"]
