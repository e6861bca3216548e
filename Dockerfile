# `bier serve` in a container: docs/serving.md. Other commands: --entrypoint bier.
FROM python:3.12-slim
# uv chooses the CPU build of torch, a tenth of the size of the build for GPUs.
RUN pip install --no-cache-dir uv
WORKDIR /opt/bier
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN uv pip install --system --no-cache --torch-backend cpu ".[serve,index,tables]"
# A user without rights: uploaded pictures are decoded in this container.
RUN useradd --create-home bier
USER bier
WORKDIR /data
EXPOSE 8000
# Any answer will do: without the token it is 401.
HEALTHCHECK --interval=30s --start-period=10m \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1:8000', timeout=5); \
  c.request('GET', '/'); assert c.getresponse().status < 500"]
ENTRYPOINT ["bier", "serve", "--host", "0.0.0.0"]
CMD ["--help"]
