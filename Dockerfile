# vllm_b70 on vLLM's public XPU image.
#
# Not run: this image was never built or started by the project (no Docker engine and no XPU where it
# is made); docs/b70.md says in which order to try it on a card.
#
#   docker build -t vllm-b70 --build-arg VLLM_VERSION=v0.32.0 .
ARG VLLM_VERSION=v0.32.0

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md ./
COPY vllm_b70 vllm_b70
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai-xpu:${VLLM_VERSION}
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir /wheels/vllm_b70-*.whl && rm -r /wheels
# The one switch that the plugin reads to be on; unset it (or set 0) for stock vLLM.
ENV VLLM_B70=1
