# Images of forge-server. vLLM and veRL run in images or environments of their own; no GPU is needed here.
#
#     docker build --target server  -t registry.example/forge-server:1 .
#     docker build --target runner  -t registry.example/forge-runner:1 .
#     docker build --target harness -t registry.example/forge-codex:1 --build-arg HARNESS=codex .
#
# server: proxy, scheduler, controller, store, API. runner: what every attempt's pod gets, the /forge tree. harness: the same
# with one harness at /forge/env. Neither of the last two has anything else in it: no shell, no libc outside of /forge.
FROM node:24-bookworm-slim AS build
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates git patchelf python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# with Debian's Python, which is what the /forge tree brings: environments of harnesses are made for it
RUN python3 -m venv /opt/forge && /opt/forge/bin/pip install --no-cache-dir build \
    && /opt/forge/bin/python -m build --wheel --outdir /dist \
    && /opt/forge/bin/pip install --no-cache-dir /dist/*.whl

FROM build AS runner-tree
RUN /opt/forge/bin/python -m forge_server.runner.tree /tree/forge

FROM scratch AS runner
COPY --from=runner-tree /tree/ /
CMD ["/forge/bin/python3"]

FROM build AS harness-tree
ARG HARNESS
# of harnesses whose spec names another Python than Debian's (install.python): `--build-arg PYTHON=3.12`
ARG PYTHON=""
ENV FORGE_CACHE=/cache
RUN if [ -n "$PYTHON" ]; then \
        /opt/forge/bin/pip install --no-cache-dir uv && /opt/forge/bin/uv python install "$PYTHON"; \
    fi
RUN /opt/forge/bin/forge-server env create "$HARNESS" \
    && /opt/forge/bin/python -m forge_server.runner.tree /tree/forge /cache/envs/*

FROM scratch AS harness
COPY --from=harness-tree /tree/ /
CMD ["/forge/bin/python3"]

FROM python:3.11-slim-bookworm AS server
COPY --from=build /dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/*.whl)[otel,postgres]" && rm /tmp/*.whl \
    && useradd --create-home --uid 10001 forge \
    && install -d -o forge -g forge /var/lib/forge
USER forge
WORKDIR /var/lib/forge
ENV FORGE_SERVER__HOST=0.0.0.0
EXPOSE 8400
VOLUME /var/lib/forge
ENTRYPOINT ["forge-server"]
CMD ["up"]
