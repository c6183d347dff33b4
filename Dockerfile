# The server image: proxy, scheduler, controller, store, API. vLLM and veRL run in images or environments of
# their own; neither torch nor a GPU is needed here.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM python:3.11-slim-bookworm
COPY --from=build /dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/*.whl)[postgres]" && rm /tmp/*.whl \
    && useradd --create-home --uid 10001 forge \
    && install -d -o forge -g forge /var/lib/forge
USER forge
WORKDIR /var/lib/forge
ENV FORGE_SERVER__HOST=0.0.0.0
EXPOSE 8400
VOLUME /var/lib/forge
ENTRYPOINT ["forge-server"]
CMD ["up"]
