# One image per part: docker build --target router (or engine, or operator) .
# `wheel` builds the package once; the engine takes it without dependencies, so that what vLLM pins never moves.
ARG PYTHON_IMAGE=python:3.13-slim-trixie
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY requirements/build.txt requirements/build.txt
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY optimizer optimizer
COPY router router
COPY engine engine
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 65532 --user-group --no-create-home --shell /usr/sbin/nologin kvantile

FROM base AS router
COPY requirements/router.txt /requirements.txt
RUN pip install --no-cache-dir --require-hashes --requirement /requirements.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 65532:65532
ENTRYPOINT ["kvantile-router"]

FROM ${VLLM_IMAGE} AS engine
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 -c "import kvantile_engine, kvantile_optimizer.admission"

# The planner's command with what the controller will need; the controller itself is not written yet.
FROM base AS operator
COPY requirements/operator.txt /requirements.txt
RUN pip install --no-cache-dir --require-hashes --requirement /requirements.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
USER 65532:65532
ENTRYPOINT ["kvantile"]
