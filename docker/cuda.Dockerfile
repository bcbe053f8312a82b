# ROLL on NVIDIA accelerators, with DeepSpeed, Megatron, LoRA and an inference engine. From a checkout:
#
#   docker build -f docker/cuda.Dockerfile -t roll:cuda .
#   docker run --rm --init --gpus all --shm-size 16g -v "$PWD:/work" --user "$(id -u):$(id -g)" roll:cuda train my_run.yaml
#
# ENGINE is vllm, or sglang, which brings another torch. The image has the compiler, because DeepSpeed builds kernels at
# first use. This file has been linted (tests/test_docs_docker.py), and neither been built nor run yet.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ARG TORCH_INDEX=""
ARG ENGINE="vllm"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HOME=/home/roll ROLL_CACHE=/home/roll/cache \
    PATH=/opt/roll/bin:$PATH

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/roll

COPY requirements.txt requirements-backends.txt /src/
# DeepSpeed's build imports the torch that is there, so it isn't isolated and gets its tools first.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' /src/requirements.txt)" \
    && pip install -r /src/requirements.txt \
    && pip install setuptools wheel ninja \
    && pip install --no-build-isolation -c /src/requirements.txt -r /src/requirements-backends.txt

COPY . /src
RUN pip install "/src[$ENGINE,liger]" \
    && useradd --create-home --home-dir /home/roll --uid 10001 roll \
    && install -d -m 1777 /work /home/roll /home/roll/cache

USER 10001
WORKDIR /work
ENTRYPOINT ["roll"]
CMD ["--help"]
