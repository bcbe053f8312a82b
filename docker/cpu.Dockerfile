# ROLL on a CPU. From a checkout:
#
#   docker build -f docker/cpu.Dockerfile -t roll:cpu .
#   docker run --rm --init -v "$PWD:/work" --user "$(id -u):$(id -g)" roll:cpu train my_run.yaml
#
# The package index decides which torch that is; for a small image give one with builds for a CPU alone:
# --build-arg TORCH_INDEX=<url>. This file has been linted (tests/test_docs_docker.py), and not been built yet.
FROM python:3.11.13-slim-bookworm

ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HOME=/home/roll ROLL_CACHE=/home/roll/cache

# A sandbox for programs of the model works without further packages: sandlock comes with the requirements.
COPY requirements.txt /src/
# The line that grep finds has a version.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' /src/requirements.txt)" \
    && pip install -r /src/requirements.txt

COPY . /src
RUN pip install --no-deps /src \
    && useradd --create-home --home-dir /home/roll --uid 10001 roll \
    && install -d -m 1777 /work /home/roll /home/roll/cache

USER 10001
WORKDIR /work
ENTRYPOINT ["roll"]
CMD ["--help"]
