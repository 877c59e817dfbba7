# modelmill on an NVIDIA GPU:  docker build -f docker/cuda.Dockerfile -t modelmill:cuda .
# torch brings the CUDA runtime; Triton and nvcc compile kernels for the GPU at their first use, into the cache volume.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 modelmill
RUN python3 -m venv /opt/modelmill
ENV PATH=/opt/modelmill/bin:$PATH
ARG EXTRAS=serve,gpu
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir torch==2.13.0 \
    && grep -vE '^(torch|triton)==' constraints.txt > /tmp/rest.txt \
    && pip install --no-cache-dir -c /tmp/rest.txt ".[${EXTRAS}]" \
    && rm -rf /src/* /tmp/rest.txt
WORKDIR /home/modelmill
USER 10001
# a volume takes the owner of the folder that the image has in its place; without it, root
RUN mkdir /home/modelmill/cache
ENV MODELMILL_CACHE=/home/modelmill/cache TRITON_CACHE_DIR=/home/modelmill/cache/triton
VOLUME ["/engines", "/home/modelmill/cache"]
EXPOSE 8000
HEALTHCHECK --start-period=15m --interval=10s --timeout=3s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["modelmill"]
CMD ["serve", "--help"]
