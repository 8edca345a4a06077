# One image for every Bedplate process; docker-compose.yml says which one a container is.
FROM node:22-bookworm-slim AS console
WORKDIR /src
COPY docs/reference/openapi.json docs/reference/openapi.json
COPY controlplane/console controlplane/console
RUN cd controlplane/console && npm ci --no-audit --no-fund && npm run build

FROM debian:12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY --from=console /src/controlplane/console/dist controlplane/console/dist
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY controlplane controlplane
COPY hostagent hostagent
COPY provisioning provisioning
COPY migrations migrations
RUN python3 -m venv /opt/bedplate/venv && /opt/bedplate/venv/bin/pip install --no-cache-dir -c constraints.txt .

FROM debian:12-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
  && useradd --system --uid 10001 --home-dir /var/lib/bedplate --create-home --shell /usr/sbin/nologin bedplate \
  && chmod 0711 /var/lib/bedplate
COPY --from=build /opt/bedplate/venv /opt/bedplate/venv
ENV PATH=/opt/bedplate/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
USER bedplate
WORKDIR /var/lib/bedplate
VOLUME /var/lib/bedplate
ENTRYPOINT []
CMD ["python", "-m", "controlplane.api"]
